from pathlib import Path

import pytest
import yaml

from chunkserve.deploy.config import DEFAULT_FILE, ConfigError, ServeConfig, parse_bytes

CLUSTER_FILE = DEFAULT_FILE.with_name("config.cluster.yaml")


def application(file: Path = DEFAULT_FILE) -> dict:
    return yaml.safe_load(file.read_text())


def test_the_file_states_every_knob_with_its_default() -> None:
    (app,) = application()["applications"]
    assert set(app["args"]) == set(ServeConfig.model_fields)
    assert ServeConfig.from_args(app["args"]) == ServeConfig()


def test_the_file_listens_on_loopback_and_points_at_the_app() -> None:
    file = application()
    assert file["http_options"]["host"] == "127.0.0.1"
    assert file["applications"][0]["import_path"] == "chunkserve.deploy.app:build"


@pytest.mark.parametrize("file", [DEFAULT_FILE, CLUSTER_FILE])
def test_the_file_is_one_that_serve_accepts(file: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(application(file))


def test_the_cluster_file_states_every_knob_of_both_models() -> None:
    applications = application(CLUSTER_FILE)["applications"]
    configs = [ServeConfig.from_args(app["args"]) for app in applications]
    assert all(set(app["args"]) == set(ServeConfig.model_fields) for app in applications)
    assert [(config.tensor_parallel_size, config.device) for config in configs] == [(1, "cuda"), (8, "cuda")]
    assert len({app["route_prefix"] for app in applications}) == 2


@pytest.mark.parametrize(
    ("knob", "value", "says"),
    [
        ("chunk_size_tokens", 40, "multiple of 16"),
        ("chunk_size_tokens", 0, "greater than or equal to 16"),
        ("chunk_size_tokens", 272, "less than or equal to 256"),
        ("chunk_size_tokens", True, "whole number"),
        ("num_replicas", "2", "whole number"),
        ("num_replicas", 0, "greater than or equal to 1"),
        ("dtype", "fp8", "bfloat16"),
        ("kv_pool_bytes", "2 gallons", "512MB"),
        ("kv_pool_bytes", 0, "at least 1"),
        ("num_threads", "all", "auto"),
        ("prefix_sharing", "no", "boolean"),
        ("request_timeout_s", float("nan"), "finite"),
        ("request_timeout_s", 0, "greater than 0"),
        ("max_sequence_tokens", 1, "at least 2|equal to 2"),
        ("max_body_bytes", "1.5", "1024"),
        ("model", None, "string"),
    ],
)
def test_a_wrong_value_names_knob_limit_and_value(knob: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        ServeConfig.from_args({knob: value})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{knob}: ")
    assert f"got {value!r}" in line or knob == "max_body_bytes"


def test_every_fault_has_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_args({"num_replicas": 0, "num_threads": 0, "kv_pool_byte": 1})
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert "kv_pool_byte: no such knob; did you mean kv_pool_bytes?" in lines


@pytest.mark.parametrize(
    "args",
    [
        {"kv_pool_bytes": "1GiB", "kv_pool_chunks": 100},
        {"max_step_tokens": 8, "max_running_sequences": 9},
    ],
)
def test_contradicting_knobs_are_both_named(args: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_args(args)
    assert all(knob in str(caught.value) for knob in args)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * 2**30), ("1.5 MB", 1_500_000), ("7", 7), ("10 kib", 10_240), (5, 5), ("auto", "auto")],
)
def test_sizes(text: object, size: object) -> None:
    assert parse_bytes(text) == size


def test_model_name() -> None:
    assert ServeConfig(model="models/llama-7b/").model_name == "llama-7b"
    assert ServeConfig(model="models/llama-7b", served_model_name="seven").model_name == "seven"
