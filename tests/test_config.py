from __future__ import annotations

from dataclasses import fields

import pytest

from inference.config import DEFAULT_MODEL, Settings, describe
from inference.errors import ConfigError


def test_defaults():
    settings = Settings.from_env({})
    assert settings.embedding_models == (DEFAULT_MODEL,) and settings.reranker_models == () and settings == Settings()


@pytest.mark.parametrize("name, text, field, value", [
    ("MLXCEL_EMBEDDING_MODEL", "a, b/c ,", "embedding_models", ("a", "b/c")), ("MLXCEL_EMBEDDING_MODEL", "", "embedding_models", ()),
    ("MLXCEL_MODEL_ALIASES", "a=b, c=d", "aliases", {"a": "b", "c": "d"}), ("MLXCEL_ALLOW_DOWNLOAD", "On", "allow_download", True),
    ("MLXCEL_EMBEDDING_POOLING", " Last ", "pooling", "lasttoken"), ("MLXCEL_EMBEDDING_POOLING", "  ", "pooling", None),
    ("MLXCEL_EMBEDDING_NORMALIZE", "-1", "normalize", -1.0), ("MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS", "0", "timeout", 120.0)])
def test_values(name, text, field, value):
    assert getattr(Settings.from_env({name: text}), field) == value


@pytest.mark.parametrize("name, text, part", [
    ("MLXCEL_BACKEND", "cuda", "auto, mlx, host"), ("MLXCEL_THREADS", "0", "at least 1"), ("MLXCEL_THREADS", "two", "whole number"),
    ("MLXCEL_EMBEDDING_POOLING", "none", "one vector per token"), ("MLXCEL_EMBEDDING_POOLING", "attention", "cls"),
    ("MLXCEL_EMBEDDING_NORMALIZE", "-2", "at least -1"), ("MLXCEL_EMBEDDING_NORMALIZE", "nan", "at least"),
    ("MLXCEL_EMBEDDING_NORMALIZE", "0.5", "p-norm"), ("MLXCEL_ALLOW_DOWNLOAD", "maybe", "true"),
    ("MLXCEL_MODEL_ALIASES", "a", "alias=model"), ("MLXCEL_STALL_LIMIT_SECS", "-1", "at least 0"),
    ("MLXCEL_STALL_LIMIT_SECS", "never", "a number"), ("MLXCEL_REDIS_URL", "redis://localhost:notaport", "port is not a number"),
    ("MLXCEL_REDIS_URL", "redis://localhost/zero", "database is not a number"), ("MLXCEL_REDIS_URL", "http://localhost", "rediss://"),
    ("MLXCEL_REDIS_URL", "unix://", "unix://path")])
def test_errors_name_the_setting_the_value_and_what_is_accepted(name, text, part):
    with pytest.raises(ConfigError) as error:
        Settings.from_env({name: text})
    assert name in str(error.value) and text in str(error.value) and part in str(error.value)


@pytest.mark.parametrize("url", [
    "redis://:s3cret@localhost:port", "http://me:s3cret@localhost", "redis://:s3cret", "redis://localhost/x?password=s3cret"])
def test_passwords_of_redis_are_not_shown(url):
    with pytest.raises(ConfigError) as error:
        Settings.from_env({"MLXCEL_REDIS_URL": url})
    assert "MLXCEL_REDIS_URL=(not shown)" in str(error.value) and "s3cret" not in str(error.value)


@pytest.mark.parametrize("url", [
    "redis://localhost", "redis://:a@h:1/0", "rediss://u:p@h:6380/2?ssl_cert_reqs=none", "unix:///run/r.sock", "unix://:p@/run/r.sock?db=1"])
def test_addresses_of_redis(url):
    assert Settings.from_env({"MLXCEL_REDIS_URL": f" {url} "}).redis_url == url


@pytest.mark.parametrize("env, seconds", [
    ({}, 150), ({"MLXCEL_EMBEDDING_REQUEST_TIMEOUT_SECS": "600"}, 630), ({"MLXCEL_STALL_LIMIT_SECS": "5"}, 5),
    ({"MLXCEL_STALL_LIMIT_SECS": "0"}, 0)])
def test_the_stall_limit_follows_the_time_out(env, seconds):
    assert Settings.from_env(env).stall_seconds == seconds


def test_every_setting_is_described():
    rows = describe()
    assert len(rows) == len(fields(Settings)) and all(name.startswith("MLXCEL_") and meaning for name, _, meaning in rows)
