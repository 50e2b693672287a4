"""The configurations in docs/howto/scale.md are what nginx, systemd and Kubernetes read."""

from __future__ import annotations

import re
import shlex
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from trimcp.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "scale.md"

LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}}
PORT = {"type": ["integer", "string"]}
PROBE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["httpGet"],
    "properties": {
        "httpGet": {"type": "object", "required": ["path", "port"], "properties": {"port": PORT}},
        "periodSeconds": {"type": "integer", "minimum": 1},
        "failureThreshold": {"type": "integer", "minimum": 1},
    },
}
CONTAINER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "image"],
    "properties": {
        "name": {"type": "string"},
        "image": {"type": "string"},
        "args": {"type": "array", "items": {"type": "string"}},
        "env": {"type": "array", "items": {"type": "object", "required": ["name", "valueFrom"]}},
        "ports": {"type": "array", "items": {"type": "object", "required": ["containerPort"]}},
        "readinessProbe": PROBE,
        "livenessProbe": PROBE,
        "lifecycle": {
            "type": "object",
            "properties": {
                "preStop": {
                    "type": "object",
                    "required": ["exec"],
                    "properties": {
                        "exec": {
                            "type": "object",
                            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                        }
                    },
                }
            },
        },
        "resources": {
            "type": "object",
            "additionalProperties": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
}
SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("apps/v1", "Deployment"): {
        "required": ["selector", "template"],
        "properties": {
            "replicas": {"type": "integer"},
            "selector": {"properties": {"matchLabels": LABELS}},
            "template": {
                "required": ["metadata", "spec"],
                "properties": {
                    "spec": {
                        "additionalProperties": False,
                        "required": ["containers"],
                        "properties": {
                            "terminationGracePeriodSeconds": {"type": "integer"},
                            "containers": {"type": "array", "items": CONTAINER},
                        },
                    }
                },
            },
        },
    },
    ("v1", "Service"): {"required": ["selector", "ports"], "properties": {"selector": LABELS}},
    ("policy/v1", "PodDisruptionBudget"): {"required": ["selector"], "properties": {"maxUnavailable": PORT}},
}


def blocks(kind: str) -> list[str]:
    """The code blocks of one kind on the page."""
    return re.findall(rf"^```{kind}[^\n]*\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


def options_of(words: list[str]) -> None:
    """Let our own command read them: it finds an option that it does not have before it does anything."""
    said = CliRunner().invoke(app, [words[0], "--help"])
    assert said.exit_code == 0, said.output
    unknown = [word for word in words if word.startswith("--") and word not in said.output]
    assert unknown == []


def test_kubernetes_reads_the_manifests() -> None:
    [text] = blocks("yaml")
    found = list(YAML(typ="safe", pure=True).load_all(text))
    assert [(each["apiVersion"], each["kind"]) for each in found] == list(SPECS)
    for each in found:
        assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
        jsonschema.validate(each["spec"], SPECS[each["apiVersion"], each["kind"]])
    deployment, service, _budget = found
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    options_of(container["args"])
    grace = float(container["args"][container["args"].index("--grace") + 1])
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= before + grace + 5


def test_a_manifest_that_is_wrong_is_found() -> None:
    [text] = blocks("yaml")
    wrong = next(YAML(typ="safe", pure=True).load_all(text.replace("image:", "picture:")))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong["spec"], SPECS["apps/v1", "Deployment"])


def test_systemd_reads_the_unit() -> None:
    [text] = blocks("ini")
    unit = ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[method-assign, assignment]
    unit.read_string(text)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    options_of(words[1:])
    assert float(service["TimeoutStopSec"]) >= float(words[words.index("--grace") + 1]) + 5


@pytest.mark.needs("nginx")
def test_nginx_reads_its_configuration(tmp_path: Path) -> None:
    [text] = blocks("nginx")
    own = "".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/log; events {{}} http {{ access_log off; {own}\n{text} }}", "utf-8"
    )
    said = subprocess.run(
        ["nginx", "-t", "-c", str(whole), "-p", str(tmp_path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert said.returncode == 0, said.stderr
