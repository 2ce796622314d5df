"""Everything about models. Knows nothing of Django: the web reaches it through `client`, `wire`, `errors` and `config` alone."""
