"""Pages that come from code and results are what `make docs` would write now."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from streamfw.broker import Broker
from streamfw_kafka import KafkaBroker
from streamfw_kafka.settings import Settings as KafkaSettings
from streamfw_rabbit import RabbitBroker
from streamfw_rabbit.settings import Settings as RabbitSettings

ROOT = Path(__file__).resolve().parents[2]


def test_rendered_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/render_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("broker", "settings"), [(KafkaBroker, KafkaSettings), (RabbitBroker, RabbitSettings)])
def test_a_docstring_says_each_option_and_its_default(broker: type[Broker], settings: type[msgspec.Struct]) -> None:
    options = [p.name for p in inspect.signature(broker).parameters.values() if p.kind is p.KEYWORD_ONLY]
    kept = {field.name: field.default for field in msgspec.structs.fields(settings)}
    said = re.findall(r"^- `(\w+)` \((.+?)\): \S", inspect.getdoc(broker) or "", re.M)
    assert said == [(name, json.dumps(kept[name]).replace("null", "none")) for name in options]
