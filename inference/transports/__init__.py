"""Ways to reach the models: in this process, or (with a broker) in model workers. Loaded by dotted name from `inference.client`."""
