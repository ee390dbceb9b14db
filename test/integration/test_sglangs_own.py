"""What SGLang's own test of EPD starts and asks, with what one server answers as the measure.

Its servers, flags, environment and clients (the package `openai`, and stubs of its gRPC service),
on small random checkpoints. SGLang looks for words in an answer; these tests compare it with one
server's. Its Qwen3.5 is not served on a CPU, so Qwen3-VL has its flags.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import zmq
from grpc_health.v1 import health_pb2, health_pb2_grpc
from PIL import Image
from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc

import clips
from integration.client import Client, audio_part, data_url, image_part, text_part, user, video_part
from integration.counters import delivered
from integration.topology import Machine

pytestmark = pytest.mark.extended
Message = dict[str, Any]
Photographs = list[Image.Image]
TOKENS = 16


@dataclass(frozen=True)
class Own:
    """Servers of its tests.

    Attributes:
        entry: that its clients ask.
        reference: the checkpoint, or family, of one server that they are compared with.
        more: what a client says besides.
    """

    topology: str
    entry: str
    reference: str
    cases: tuple[Callable[[Photographs], Message], ...]
    more: dict[str, str] = field(default_factory=dict)


def image(photographs: Photographs) -> Message:
    return user(image_part(data_url(photographs[0])), text_part("Describe it in a sentence."))


def several(photographs: Photographs) -> Message:
    """As questions of MMMU have them."""
    parts = [image_part(data_url(photo.resize((224, 168)))) for photo in photographs]
    return user(text_part("Which of"), parts[0], text_part("and"), parts[1], text_part("is it?"))


def video(_photographs: Photographs) -> Message:
    return user(text_part("Describe the video."), video_part(clips.video("coffee")))


def sound(_photographs: Photographs) -> Message:
    return user(audio_part(clips.audio("low")), text_part("Write down what is said."))


def mixed(photographs: Photographs) -> Message:
    parts = [image_part(data_url(photographs[0])), audio_part(clips.audio("low"))]
    return user(*parts, video_part(clips.video("coffee")), text_part("What is each?"))


TINY = "tiny-qwen2_5-vl"
SERVERS = {
    "omni": Own("own_omni", "router", "qwen3_omni_moe", (image, video, sound, mixed)),
    "reasoning": Own(
        "own_reasoning",
        "language",
        "tiny-qwen3-vl",
        (image, video),
        {"reasoning_effort": "none"},
    ),
    "several encoders": Own("own_several", "router", TINY, (image, several)),
    "mooncake": Own("own_mooncake", "router", TINY, (image, several)),
    "grpc": Own("own_grpc", "router", TINY, (image, several)),
}


@pytest.fixture(scope="module", params=SERVERS)
def own(request: pytest.FixtureRequest) -> Own:
    return SERVERS[request.param]


def ask(server: Client, message: Message, **more: Any) -> list[tuple[str, float]]:
    """The words of an answer, and how likely they are, by SGLang's client of choice."""
    client = openai.Client(api_key="sk-123456", base_url=f"{server.url}/v1", timeout=120)
    answer = client.chat.completions.create(
        model="default",
        messages=[message],  # type: ignore[list-item]
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        extra_body=more or None,
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content
    return [(one.token, one.logprob) for one in told.content]


def check(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> None:
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert [p for _, p in ours] == pytest.approx([p for _, p in theirs], abs=1e-3)


def test_answers_are_one_servers(machine: Machine, photographs: Photographs, own: Own) -> None:
    for case in own.cases:
        message = case(photographs)
        expected = ask(machine.colocated(own.reference), message, **own.more)
        client = machine.use(own.topology).client(own.entry)
        # Again, as its tests of caches ask.
        for _ in range(2):
            check(ask(client, message, **own.more), expected)


def test_many_at_once(machine: Machine, photographs: Photographs, own: Own) -> None:
    """As MMMU is asked."""
    questions = [several([photo.rotate(turn) for photo in photographs]) for turn in range(12)]
    one = machine.colocated(own.reference)
    expected = [ask(one, question) for question in questions]
    servers = machine.use(own.topology)
    client = servers.client(own.entry)
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda question: ask(client, question), questions))
    for ours, theirs in zip(answers, expected, strict=True):
        check(ours, theirs)
    for role in servers.roles:
        if role.startswith("encoder"):
            assert delivered(servers, role) > 0, "each has its share"


@pytest.fixture
def channel(machine: Machine) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{machine.use('own_grpc').ports['encoder grpc']}")


def test_an_encoder_alone_over_grpc(
    channel: grpc.Channel, photographs: Photographs, tmp_path: Path
) -> None:
    """A place is named, and answered, before a picture of this host is to be encoded for it."""
    health = health_pb2_grpc.HealthStub(channel)
    answer = health.Check(health_pb2.HealthCheckRequest(service=""), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    photographs[0].save(tmp_path / "example.png")
    stub = sglang_encoder_pb2_grpc.SglangEncoderStub(channel)
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        place = pb.SchedulerReceiveUrlRequest(
            req_id="alone", receive_url=f"127.0.0.1:{port}", receive_count=1
        )
        stub.SchedulerReceiveUrl(place, timeout=10)
        asked = pb.EncodeRequest(
            mm_items=[str(tmp_path / "example.png")], req_id="alone", num_parts=1, part_idx=0
        )
        stub.Encode(asked, timeout=60)
        assert pull.poll(10_000)
        _facts, rows = pull.recv_multipart()
        # 600 x 400 px, as patches of 28 px; 64 float32.
        assert len(rows) % (21 * 14) == 0
    channel.close()
