"""Which requests are prefilled in parts, and parts as requests of SGLang's."""

from __future__ import annotations

import math
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_epd.seams import early
from sglang_epd.wire.messages import Expect

IMAGE, VIDEO, AUDIO = 151_655, 151_656, 7
PROCESSOR = SimpleNamespace(IM_TOKEN_ID=IMAGE, VIDEO_TOKEN_ID=VIDEO, audio_token_id=None)


@pytest.fixture
def request_of(sglang):
    """A request as the tokenizer sends it."""
    io_struct = sglang("managers.io_struct")
    sampling = sglang("sampling.sampling_params")

    def make(*ids: int, **fields: Any) -> Any:
        given = {
            "input_text": "text",
            "input_ids": array("q", ids),
            "input_embeds": None,
            "mm_inputs": None,
            "token_type_ids": None,
            "sampling_params": sampling.SamplingParams(max_new_tokens=9, regex="a", n=2),
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 3,
            "token_ids_logprob": [1],
            "stream": True,
            "rid": "r",
            **fields,
        }
        return io_struct.TokenizedGenerateReqInput(**given)

    return make


def read(request: Any, items: int, *, apart: bool = False) -> Any:
    return early.reader(PROCESSOR, apart=apart)(request, Expect("ticket", items, 60.0))


def test_items_are_numbered_by_modality_and_found_by_place(request_of):
    prompt = read(request_of(1, VIDEO, 2, IMAGE, 3, IMAGE), 3)
    assert prompt.places == (1, 3, 5)
    assert prompt.items == (2, 0, 1), "pictures come first"
    assert list(prompt.ids) == [1, VIDEO, 2, IMAGE, 3, IMAGE]


def test_a_prompt_whose_placeholders_are_not_its_items_has_no_parts(request_of):
    assert read(request_of(1, IMAGE, IMAGE), 1) is None, "expanded already"
    assert read(request_of(1, 2), 1) is None
    assert read(request_of(1, IMAGE, input_ids=None), 1) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"lora_id": "adapter"},
        {"session_id": "session"},
        {"return_hidden_states": True},
        {"return_routed_experts": True},
        {"return_logprob": True, "logprob_start_len": 0},
    ],
    ids=str,
)
def test_what_needs_its_whole_prompt_has_no_parts(request_of, fields):
    assert read(request_of(1, IMAGE, **fields), 1) is None


@pytest.mark.parametrize(("due", "slept"), [(math.inf, 1000), (0.0021, 3), (0.0, 0), (3.0, 1000)])
def test_an_idle_scheduler_sleeps_no_longer_than_a_part_pauses(due, slept):
    pauses: Any = SimpleNamespace(due_s=lambda: due)
    assert early.Waking(SimpleNamespace(poll=lambda ms: ms), pauses.due_s).poll(1000) == slept


@pytest.mark.parametrize(
    ("apart", "room", "has"), [(True, None, 0), (True, 7, 1), (False, None, 1)]
)
def test_a_prefill_server_prefills_no_part_of_what_it_will_refuse(request_of, apart, room, has):
    """SGLang refuses a request without a room by what the tokenizer knows of it, which a part
    lacks."""
    whole = request_of(1, IMAGE, bootstrap_room=room)
    assert (read(whole, 1, apart=apart) is not None) == bool(has)


def test_log_probabilities_of_the_answer_need_no_prompt(request_of):
    assert read(request_of(1, IMAGE, return_logprob=True), 1) is not None


def test_a_part_asks_for_nothing_but_kv(request_of):
    whole = request_of(1, IMAGE, 2, cache_salt="salt", extra_key="key", priority=5)
    part = early.make(whole, "r.early-1", array("q", [1]))
    assert (part.rid, list(part.input_ids), part.input_text) == ("r.early-1", [1], "")
    assert part.sampling_params.max_new_tokens == 0
    assert part.sampling_params.is_normalized
    assert (part.sampling_params.regex, part.sampling_params.n) == (None, 1)
    assert (part.stream, part.return_logprob, part.token_ids_logprob) == (False, False, None)
    assert (part.cache_salt, part.extra_key, part.priority) == ("salt", "key", 5)
    assert part.bootstrap_room is None
    assert (whole.rid, list(whole.input_ids)) == ("r", [1, IMAGE, 2]), "the request is as it was"
    assert whole.sampling_params.max_new_tokens == 9


def test_a_part_of_a_prefill_servers_request_is_sent_to_no_decode_server(request_of):
    whole = request_of(1, IMAGE, bootstrap_host="there", bootstrap_port=1, bootstrap_room=7)
    part = early.make(whole, "r.early-1", array("q", [1]))
    assert (part.bootstrap_host, part.bootstrap_room) == ("2.2.2.2", 0)
    assert (whole.bootstrap_host, whole.bootstrap_room) == ("there", 7)


@pytest.fixture
def parts_of(flags, monkeypatch):
    """The parts on a rank of a server with these flags."""

    def parts_of(
        asked: str = "on",
        elsewhere: range = range(0),
        switches: bool = False,
        preempts: bool = False,
        mode: str = "null",
        beside: bool = False,
        **parallel: Any,
    ) -> Any:
        monkeypatch.setenv("SGLANG_EPD_PREFILL_EARLY", asked)
        flags(
            disagg={
                "enable_pd_role_switch": switches,
                "disaggregation_mode": mode,
                "enable_pdmux": beside,
            },
            memory={"disable_radix_cache": False},
            observability={"enable_metrics": False},
            parallel={"pp_size": 1, "pp_rank": 0, "attn_dp_enabled": False, **parallel},
            schedule={"max_queued_requests": None},
        )
        tree = SimpleNamespace(
            disable=False, supports_mamba=lambda: False, supports_swa=lambda: False
        )
        scheduler: Any = SimpleNamespace(
            tree_cache=tree,
            is_generation=True,
            page_size=1,
            enable_priority_preemption=preempts,
        )
        ranks: Any = SimpleNamespace(elsewhere=elsewhere, leads=True)
        return early.parts(scheduler, ranks)

    return parts_of


@pytest.mark.parametrize("switches", [False, True])
def test_a_server_that_may_come_to_decode_prefills_no_parts(parts_of, switches):
    assert (parts_of(switches=switches) is None) == switches


@pytest.mark.parametrize("beside", [False, True])
def test_a_server_that_prefills_beside_decoding_prefills_no_parts(parts_of, beside):
    assert (parts_of(beside=beside) is None) == beside


@pytest.mark.parametrize(("mode", "some"), [("null", True), ("prefill", True), ("decode", False)])
def test_a_decode_server_prefills_no_parts(parts_of, mode, some):
    """A part is from no prefill server, and its KV would be kept as if it were."""
    assert (parts_of(mode=mode) is not None) == some


@pytest.mark.parametrize("preempts", [False, True])
def test_no_part_throws_others_out_of_their_batch(parts_of, preempts):
    assert (parts_of(preempts=preempts) is None) == preempts


@pytest.mark.parametrize("off", [{"attn_dp_enabled": True}, {"elsewhere": range(2, 4)}], ids=str)
@pytest.mark.parametrize("pp_rank", [0, 1])
def test_all_stages_prefill_parts_or_none(parts_of, off, pp_rank):
    assert parts_of(pp_size=2, pp_rank=pp_rank) is not None
    assert parts_of(pp_size=2, pp_rank=pp_rank, **off) is None


@pytest.mark.parametrize(
    ("asked", "mode", "some"),
    [("auto", "null", False), ("auto", "prefill", True), ("on", "null", True)],
)
def test_no_part_stops_what_other_replicas_decode(parts_of, asked, mode, some):
    """With attention of its own each steps with all others, of which it sees nothing."""
    assert (parts_of(asked, mode=mode, attn_dp_enabled=True) is not None) == some
    assert parts_of(asked, mode=mode) is not None


def test_the_first_stage_alone_decides_and_tells_the_others(parts_of):
    """A host of a later one may be set otherwise."""
    first, later = parts_of(pp_size=2), parts_of(pp_size=2, pp_rank=1, asked="off")
    for one in (first, later):
        one.expect("r.early-1", "r", 1)
    assert (len(first.heard), len(later.heard)) == (1, 0)
    assert parts_of(pp_size=2, asked="off") is None
    assert parts_of().heard == []
