"""`SGLANG_EPD=off` leaves SGLang's own EPD as it is, on the same CPU platform."""

from __future__ import annotations

import requests
from PIL import Image

from integration.client import data_url, image_part, text_part, user
from integration.topology import Machine


def test_in_tree_epd_runs_with_the_switch_off(
    machine: Machine, photographs: list[Image.Image]
) -> None:
    topology = machine.use("in_tree")
    message = user(image_part(data_url(photographs[0].resize((224, 168)))), text_part("What?"))
    expected = machine.colocated(topology.model).generation(message)
    topology.client().generation(message).check(expected)
    # Ours answers here, theirs does not.
    status = requests.get(f"{topology.urls['encoder']}/v1/status", timeout=10)
    assert status.status_code == 404
    assert "Dispatching 1 mm items" in topology.log("language")
    assert "namespace" not in topology.log("encoder")
