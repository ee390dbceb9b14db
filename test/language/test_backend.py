from __future__ import annotations

import copy
from array import array
from functools import partial
from http import HTTPStatus
from types import SimpleNamespace

import msgspec
import pytest
import torch

from sglang_epd.errors import (
    DeadlineError,
    EpdError,
    MediaError,
    RequestCancelledError,
    _tree,
)
from sglang_epd.language import backend as backend_module
from sglang_epd.language import manifest
from sglang_epd.language.backend import Backend, Leader
from sglang_epd.language.parts import Parts
from sglang_epd.language.prefix import PrefixGate
from sglang_epd.language.relay import RelayError
from sglang_epd.spans import OFF
from sglang_epd.tally import Tally
from sglang_epd.wire.messages import (
    AskPrefix,
    Beginning,
    Expect,
    Landed,
    Layout,
    Settled,
    TensorSpec,
)
from spans import said

SECRET = bytes(range(32))
EXPECT = Expect("ticket", 1, 60.0)
LAID_OUT = SimpleNamespace(input_ids=[1, 2])
LAYOUT = Layout("IMAGE", TensorSpec("float32", (2, 4)), [[1, 2, 4]])


class FakeClaims:
    """The control channel; what settles is what the test says."""

    def __init__(self) -> None:
        self.claims: dict[str, Expect] = {}
        self.covered: list[tuple[int, ...]] = []
        self.asked: list[bool] = []
        self.announced: list[tuple[str, Expect]] = []
        self.abandoned: list[str] = []
        self._settled: list[Settled] = []

    def claim(
        self,
        claim: str,
        expect: Expect,
        covered: tuple[int, ...] = (),
        *,
        prefix: bool = False,
        early: bool = False,
    ) -> None:
        assert claim not in self.claims, "each claim has a name of its own"
        self.claims[claim] = expect
        self.covered.append(covered)
        self.asked.append(prefix)

    def again(self, rid: str, expect: Expect) -> None:
        self.announced.append((rid, expect))

    def abandon(self, claim: str) -> None:
        self.abandoned.append(claim)

    def take(self) -> list[Settled]:
        taken, self._settled = self._settled, []
        return taken

    def lay(self, number: int, keys: tuple, layouts: tuple) -> None:
        self._settled.append(AskPrefix(list(self.claims)[number], keys, layouts))

    def settle(self, number: int, *items: Landed, error: EpdError | None = None) -> None:
        code, message = (error.code, error.message) if error else ("", "")
        self._settled.append(Settled(list(self.claims)[number], items, code, message))


@pytest.fixture
def claims():
    return FakeClaims()


@pytest.fixture
def leader(claims):
    return Leader(claims, SECRET, prefix=False, resume=lambda _trace: OFF)


@pytest.fixture
def clock(monkeypatch):
    """The leader's; it stands still, at `now`."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(backend_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def assembled():
    """What `assemble` is called with; it may be made to raise."""
    return SimpleNamespace(calls=[], error=None)


class FakeGate:
    def __init__(self) -> None:
        self.held: set[str] = set()
        self.told: list = []

    def forgo(self, rid: str) -> None:
        """None is asked about."""

    def holds(self, rid):
        return rid in self.held

    def resolve(self, rid, outcome):
        self.told.append((rid, outcome))
        return ("req", "no", HTTPStatus.BAD_REQUEST) if outcome.code else None

    def fail(self, rid, error):
        self.told.append((rid, error))
        return "req", error.message, HTTPStatus.BAD_REQUEST


@pytest.fixture
def gate():
    return FakeGate()


@pytest.fixture
def backend(memory, assembled, gate):
    """Of a rank, the first one unless another is named."""

    def assemble(request, items):
        assembled.calls.append((request.rid, [item.key for item in items]))
        if assembled.error:
            raise assembled.error
        embeddings = [item.embedding for item in items]
        return SimpleNamespace(input_ids=[1, 2, 3], embeddings=embeddings)

    def of_rank(reader: int = 0, span_of=lambda _request: OFF) -> Backend:
        return Backend(
            partial(memory.rank(reader).receive, reader=reader),
            reader,
            assemble=assemble,
            abortable=lambda r: f"abort {r.rid}",
            secret=SECRET,
            lay_out=lambda _request, _expect: LAID_OUT,
            gate=gate,
            span_of=span_of,
        )

    return of_rank


def request(rid: str = "rid", carried: Expect | Settled = EXPECT, input_ids=None):
    return SimpleNamespace(
        rid=rid,
        need_wait_for_mm_inputs=True,
        encoder_urls=manifest.write(carried, SECRET),
        input_ids=input_ids,
        mm_inputs=None,
    )


def outcome(request) -> Settled:
    """Written in a request that was passed on."""
    return manifest.read_settled(request.encoder_urls, SECRET)


def text(rid: str = "text") -> SimpleNamespace:
    return SimpleNamespace(rid=rid, need_wait_for_mm_inputs=None)


def settled(*items: Landed, error: EpdError | None = None) -> Settled:
    code, message = (error.code, error.message) if error else ("", "")
    return Settled("0", items, code, message)


# The rank that leads.


def test_a_request_is_held_back_until_its_items_are_there(leader, claims, memory):
    waiting = request(input_ids=[1, 2])
    assert leader.load() == (0, 0)
    assert leader.pass_on([waiting]) == []
    assert leader.waiting == [waiting]
    assert leader.load() == (1, 2 + sum(layout.tokens for layout in EXPECT.layouts))
    assert list(claims.claims.values()) == [EXPECT]
    assert leader.pass_on([]) == []

    item = memory.land(1.0)
    claims.settle(0, item)
    (passed,) = leader.pass_on([])
    assert passed is waiting
    assert outcome(passed).items == (item,)
    assert leader.waiting == []
    assert leader.load() == (0, 0)
    assert leader.pass_on([]) == []


def test_an_abort_in_the_same_tick_comes_after_the_request_that_it_ends(leader, claims, memory):
    """The scheduler looks for it among its own, where it must be by then."""
    waiting, abort = request(), SimpleNamespace(rid="rid", abort_all=False)
    leader.pass_on([waiting])
    claims.settle(0, memory.land(1.0))
    assert leader.pass_on([abort]) == [waiting, abort]


# As many others as there are in test_manifest.py.
FORGED = {
    "nothing": None,
    "another server's": manifest.write(EXPECT, bytes(32)),
    "an outcome": manifest.write(settled(), SECRET),
    "another server's outcome": manifest.write(settled(), bytes(32)),
}


@pytest.mark.parametrize("encoder_urls", FORGED.values(), ids=FORGED)
def test_a_manifest_that_a_user_wrote_is_a_failure_at_once(leader, claims, backend, encoder_urls):
    forged = request()
    forged.encoder_urls = encoder_urls
    assert leader.pass_on([forged]) == [forged]
    assert not claims.claims
    assert not leader.waiting
    ready, ((abort, _, status),) = backend().sort_out([forged])
    assert (ready, abort, status) == ([], "abort rid", HTTPStatus.BAD_REQUEST)
    assert forged.input_ids == array("q")
    assert forged.mm_inputs is None


@pytest.mark.parametrize(
    ("secret", "through_leader"), [(bytes(32), True), (bytes(32), False), (SECRET, True)]
)
def test_an_outcome_that_a_user_wrote_reads_nobodys_memory(
    leader, backend, memory, assembled, secret, through_leader
):
    others = memory.land(1.0)
    forged = request()
    forged.encoder_urls = manifest.write(settled(others), secret)
    received = leader.pass_on([forged]) if through_leader else [forged]
    ready, failed = backend().sort_out(received)
    assert (ready, len(failed)) == ([], 1)
    assert not assembled.calls
    assert memory.drops(others) == [0, 0, 0]


def test_abandoned_requests_are_those_that_match(leader, claims):
    leader.pass_on([request(rid) for rid in ("a-1", "a-2", "b")])
    leader.abandon(lambda rid: rid.startswith("a"))
    leader.abandon(lambda rid: rid.startswith("a-1"))
    assert claims.abandoned == list(claims.claims)[:2], "once each"
    # They come back as failures when the receiver has let them go.
    assert len(leader.waiting) == 3
    claims.settle(0, error=RequestCancelledError("the request was aborted"))
    (passed,) = leader.pass_on([])
    assert passed.rid == "a-1"
    assert outcome(passed).code == "RequestCancelledError"


def test_what_lands_after_all_does_not_save_an_abandoned_request(
    leader, claims, backend, memory, assembled
):
    """The outcome was on its way when the abort came; every rank gives its items back."""
    leader.pass_on([request()])
    item = memory.land(1.0)
    claims.settle(0, item)
    leader.abandon(lambda rid: True)
    passed = leader.pass_on([])
    for rank in range(3):
        ready, failed = backend(rank).sort_out(copy.deepcopy(passed))
        assert ready == []
        assert failed == [("abort rid", "the request was aborted", HTTPStatus.BAD_REQUEST)]
    assert not assembled.calls
    assert memory.drops(item) == [1, 1, 1]
    leader.abandon(lambda rid: True)
    assert len(claims.abandoned) == 1
    assert not leader._open


def test_an_abandoned_request_that_had_failed_keeps_its_reason(leader, claims):
    leader.pass_on([request()])
    claims.settle(0, error=DeadlineError("late"))
    leader.abandon(lambda rid: True)
    (passed,) = leader.pass_on([])
    assert outcome(passed).message == "late"


LIMIT_S = EXPECT.ttl_s + backend_module.GRACE_S


def test_what_lands_after_its_request_was_given_up_is_dropped_by_all_ranks(
    leader, claims, backend, memory, assembled, clock
):
    leader.pass_on([request()])
    clock.now += LIMIT_S + 1.1
    (failed,) = leader.pass_on([])
    assert outcome(failed).code == "UnavailableError"
    assert leader.load() == (0, 0)
    item = memory.land(1.0)
    claims.settle(0, item)
    passed = leader.pass_on([])
    for rank in range(3):
        ready, failures = backend(rank).sort_out(copy.deepcopy(passed))
        assert (ready, len(failures)) == ([], 1)
    assert not assembled.calls
    assert memory.drops(item) == [1, 1, 1]
    assert not leader._late


def test_what_needed_nothing_is_given_up_and_settles_without_a_word(leader, claims, clock):
    """The prefix cache covered its item."""
    leader.ask("name", None, EXPECT, (0,), again=False)
    clock.now += LIMIT_S + 1.1
    assert leader.pass_on([]) == []
    claims.settle(0, None)
    assert leader.pass_on([]) == []


def test_a_receiver_that_does_not_answer_is_not_waited_for(leader, claims, backend, clock, caplog):
    """It settles everything at the deadline, so long after it nothing comes any more."""
    first, second = request("first"), request("second")
    leader.pass_on([first])
    clock.now += 10.0
    leader.pass_on([second])
    leader.abandon(lambda rid: rid == "second")
    clock.now += LIMIT_S - 10.1
    assert leader.pass_on([]) == []
    clock.now += 1.1
    assert leader.pass_on([text()])[1:] == [first]
    assert leader.waiting == [second]
    assert "first" in caplog.text
    clock.now += 10.0
    assert leader.pass_on([]) == [second]
    assert leader.waiting == []
    ready, failed = backend().sort_out([first, second])
    assert ready == []
    assert [(abort, status) for abort, _, status in failed] == [
        ("abort first", HTTPStatus.SERVICE_UNAVAILABLE),
        ("abort second", HTTPStatus.SERVICE_UNAVAILABLE),
    ]
    assert not leader._open


def test_what_settled_at_the_last_moment_is_not_given_up(leader, claims, memory, clock):
    leader.pass_on([request()])
    claims.settle(0, memory.land(1.0))
    clock.now += LIMIT_S
    (passed,) = leader.pass_on([])
    assert not outcome(passed).code
    clock.now += LIMIT_S
    assert leader.pass_on([]) == []


# Every rank.


def test_every_rank_reads_the_same_memory_and_gives_it_back(
    leader, claims, backend, memory, filled
):
    leader.pass_on([request("a"), request("b", input_ids=array("q", [5]))])
    good, bad = memory.land(1.0), memory.land(2.0)
    claims.settle(0, good)
    claims.settle(1, bad, error=MediaError("no"))
    passed = leader.pass_on([])
    of_ranks = []
    for rank in range(3):
        (ready,), (failed,) = backend(rank).sort_out(copy.deepcopy(passed))
        assert torch.equal(ready.mm_inputs.embeddings[0], filled(1.0))
        assert memory.holds(rank, ready.mm_inputs.embeddings[0])
        assert failed == ("abort b", "no", HTTPStatus.BAD_REQUEST)
        of_ranks.append(ready)
    assert memory.drops(bad) == [1, 1, 1]
    for rank in (1, 0, 2):
        assert memory.drops(good)[rank] == 0
        of_ranks[rank].mm_inputs = None
        assert memory.drops(good)[rank] == 1


def test_samples_hold_the_items_they_share_each_by_itself(backend, memory):
    """For as long as there is any view of them."""
    item = memory.land(1.0)
    samples = [request(carried=settled(item)) for _ in range(3)]
    backend().sort_out(samples)
    for number, sample in enumerate(samples):
        row = sample.mm_inputs.embeddings[0][1:]
        sample.mm_inputs = None
        assert memory.drops(item)[0] == number
        del row
    assert memory.drops(item) == [3, 0, 0]


@pytest.mark.parametrize("kind", _tree(EpdError))
def test_every_error_has_a_status_that_sglang_can_send(backend, kind):
    ready, ((abort, message, status),) = backend().sort_out(
        [request(carried=settled(error=kind("what went wrong")))]
    )
    assert not ready
    assert (abort, message) == ("abort rid", "what went wrong")
    assert isinstance(status, HTTPStatus)
    expected = HTTPStatus.BAD_REQUEST if kind is RequestCancelledError else kind.status
    assert status == expected


def test_a_failure_of_a_request_with_token_ids_keeps_them(backend):
    failing = request(carried=settled(error=DeadlineError("late")), input_ids=array("q", [5]))
    backend().sort_out([failing])
    assert failing.input_ids == array("q", [5])


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (MediaError("1 placeholder for 2 images"), "1 placeholder for 2 images", 400),
        (KeyError("a secret"), "the prompt could not be laid out with its media", 500),
    ],
)
def test_what_a_processor_fails_at_fails_that_request_only(
    backend, memory, assembled, monkeypatch, error, message, status
):
    said = []
    # A log that keeps the trace would keep the items.
    monkeypatch.setattr(backend_module.logger, "exception", lambda *parts: said.append(parts))
    items = [memory.land(1.0), memory.land(2.0)]
    assembled.error = error.with_traceback(None)
    ready, failed = backend().sort_out([request("bad", settled(*items)), text()])
    assert [one.rid for one in ready] == ["text"]
    assert failed == [("abort bad", message, HTTPStatus(status))]
    assert bool(said) == (status == 500)
    error.__traceback__ = None  # it holds the frames that the error came through
    assert [memory.drops(item) for item in items] == [[1, 0, 0]] * 2


def test_the_ticket_of_a_request_that_cannot_be_laid_out_ends(backend, leader, claims):
    """Its items would be encoded for nobody, and kept until its deadline."""

    def lay_out(_request, _expect):
        raise MediaError("2 placeholders for 1 image")

    rank = backend()
    rank._lay_out = lay_out
    rank._gate = PrefixGate(None, None, leader, rank._receive)
    one = request(carried=KNOWN)
    (passed,) = leader.pass_on([one])
    ready, failed = rank.sort_out([passed])
    assert (ready, len(failed)) == ([], 1)
    assert claims.covered == [(0, 1)], "none is needed"
    assert not leader.waiting


def test_a_rank_that_cannot_go_on_with_the_others_ends(backend, memory):
    """It does not drop the one request that the others will run."""
    rank = backend()

    def receive(_settled):
        raise RelayError("embeddings do not reach all hosts")

    rank._receive = receive
    with pytest.raises(RelayError):
        rank.sort_out([request(carried=settled(memory.land(1.0)))])


def test_without_a_gate_requests_go_on_as_they_settle(backend, gate, memory):
    gate.held = {"rid"}
    rank = backend()
    rank._gate = None
    ready, failed = rank.sort_out([request(carried=settled(memory.land(1.0)))])
    assert (len(ready), failed) == (1, [])


# Requests that the prefix cache is asked about.

KNOWN = Expect("ticket", 2, 60.0, (b"a" * 32, b"b" * 32), (LAYOUT, LAYOUT))


def test_what_may_be_covered_goes_on_at_once_and_is_claimed_when_that_is_known(leader, claims):
    one = request(carried=KNOWN)
    assert leader.pass_on([one]) == [one]
    assert not claims.claims
    leader.ask("rid", one, KNOWN, (1,), again=False)
    assert list(claims.claims.values()) == [KNOWN]
    assert claims.covered == [(1,)]
    assert leader.waiting == [one]
    claims.settle(0, error=DeadlineError("too late"))
    assert leader.pass_on([]) == [one]
    assert outcome(one).code == "DeadlineError"


@pytest.mark.parametrize("carried", [KNOWN, EXPECT])
def test_a_turn_of_a_session_waits_for_all_its_items(claims, carried):
    """The next turn's prompt begins with this one's, and its items."""
    leader = Leader(claims, SECRET, prefix=True, resume=lambda _trace: OFF)
    one = request(carried=carried)
    one.session_params = {"id": "session"}
    assert leader.pass_on([one]) == []
    assert leader.waiting == [one]
    assert claims.covered == [()]
    assert claims.asked == [False], "the prefix cache is not asked"


@pytest.mark.parametrize(
    ("streams", "session", "refused"),
    [(True, "s", True), (True, "another", False), (True, None, False), (False, "s", False)],
)
@pytest.mark.parametrize("media", [False, True])
def test_no_turn_of_a_streaming_session_overtakes_one_that_waits(
    claims, backend, streams, session, refused, media
):
    """SGLang, which refuses it while it knows of the other, has not seen that yet."""
    resume, named = lambda _trace: OFF, lambda id_: streams and id_ == "s"
    leader = Leader(claims, SECRET, prefix=True, resume=resume, streams=named)
    first, later = request("first", carried=EXPECT), request("later", carried=EXPECT)
    first.session_params = SimpleNamespace(id="s")
    later.session_params = None if session is None else SimpleNamespace(id=session)
    later.need_wait_for_mm_inputs = media
    assert leader.pass_on([first]) == []
    passed = leader.pass_on([later])
    if not refused:
        assert passed == ([] if media else [later])
        return
    assert passed == [later]
    ready, ((_, message, status),) = backend().sort_out(passed)
    assert (ready, status) == ([], 400)
    assert "already has an active request" in message
    assert leader.waiting == [first]
    assert claims.covered == [(), (0,)] if media else [()], "nothing is sent for it"
    leader.abandon("first".__eq__)
    again = request("again", carried=EXPECT)
    again.session_params, again.need_wait_for_mm_inputs = first.session_params, False
    assert leader.pass_on([again]) == [again]
    assert not again.need_wait_for_mm_inputs


def test_no_batch_of_texts_takes_a_turn_past_one_that_waits(claims):
    leader = Leader(
        claims, SECRET, prefix=True, resume=lambda _trace: OFF, streams=lambda _session: True
    )
    first, later, text = (request(rid, carried=EXPECT) for rid in ("first", "later", "text"))
    first.session_params = later.session_params = SimpleNamespace(id="s")
    later.need_wait_for_mm_inputs = text.need_wait_for_mm_inputs = False
    text.session_params = None
    assert leader.pass_on([first]) == []
    passed = leader.pass_on([SimpleNamespace(batch=[text, later])])
    assert passed == [text, later]
    assert (text.need_wait_for_mm_inputs, later.need_wait_for_mm_inputs) == (False, True)
    whole = SimpleNamespace(batch=[text])
    assert leader.pass_on([whole]) == [whole]


def test_what_another_request_for_the_same_items_failed_of_is_not_waited_for(
    leader, claims, backend
):
    """A sample of a prompt that could not be encoded."""
    one = request(carried=Settled("", (), "UnavailableError", "no encoder"))
    assert leader.pass_on([one]) == [one]
    assert not claims.claims
    ready, ((_, message, status),) = backend().sort_out([one])
    assert (ready, message, status) == ([], "no encoder", 503)


def test_a_turn_of_a_session_keeps_no_memory_that_others_wait_for(backend, memory, filled):
    """Its inputs stay until the session is closed."""
    item = memory.land(3.0)
    one = request(carried=settled(item))
    one.session_params = {"id": "session"}
    ((ready,), _) = backend().sort_out([one])
    assert memory.drops(item)[0] == 1
    assert torch.equal(ready.mm_inputs.embeddings[0], filled(3.0))


@pytest.mark.parametrize("forgone", [False, True])
def test_a_request_that_is_covered_waits_for_nothing_and_its_ticket_ends(leader, claims, forgone):
    """So does the ticket of one that ended before the prefix cache was asked."""
    one = request(carried=KNOWN)
    leader.pass_on([one])
    if forgone:
        for rid in ("rid", "rid", "another"):
            leader.forgo(rid)
    else:
        leader.ask("rid", one, KNOWN, (0, 1), again=False)
    assert not leader.waiting
    assert claims.covered == [(0, 1)]
    claims.settle(0)
    assert leader.pass_on([]) == []


def test_a_prompt_that_is_laid_out_has_its_items_tokens_in_its_ids(leader, claims):
    """They count once among a replica's loads."""
    one = request(carried=KNOWN, input_ids=list(range(9)))
    leader.pass_on([one])
    leader.ask("rid", one, KNOWN, (0,), again=False)
    assert leader.load() == (1, 9)


def test_what_is_needed_after_all_is_announced_under_a_new_ticket(leader, claims):
    one = request(carried=KNOWN)
    leader.pass_on([one])
    leader.ask("rid", one, KNOWN, (0, 1), again=False)
    leader.ask("rid", one, KNOWN, (0,), again=True)
    ((rid, expect),) = claims.announced
    assert rid == "rid"
    assert expect.ticket != KNOWN.ticket
    assert (expect.keys, expect.layouts) == (KNOWN.keys, KNOWN.layouts)
    assert list(claims.claims.values())[1] == expect
    leader.abandon(lambda rid: rid == "rid")
    assert len(claims.abandoned) == 1


def test_when_all_layouts_have_become_known_the_ranks_are_asked(leader, claims):
    one = request(carried=Expect("ticket", 2, 60.0))
    assert leader.pass_on([one]) == []
    claims.lay(0, KNOWN.keys, KNOWN.layouts)
    assert leader.pass_on([]) == [one]
    assert manifest.read_announced(one.encoder_urls, SECRET) == KNOWN
    assert not leader.waiting
    leader.ask("rid", one, KNOWN, (0,), again=False)
    assert claims.covered == [(), (0,)]
    claims.settle(1)
    assert leader.pass_on([]) == [one]


def test_a_request_that_was_aborted_when_its_layouts_became_known_ends(leader, claims):
    one = request(carried=Expect("ticket", 2, 60.0))
    leader.pass_on([one])
    leader.abandon(lambda rid: True)
    claims.lay(0, KNOWN.keys, KNOWN.layouts)
    assert leader.pass_on([]) == [one]
    assert outcome(one).code == "RequestCancelledError"
    assert claims.covered == [(), (0, 1)], "its ticket is used up"
    claims.settle(1)
    assert leader.pass_on([]) == []


@pytest.mark.parametrize("error", [None, DeadlineError("too late")])
def test_outcomes_of_what_waits_in_the_scheduler_go_there(backend, gate, error):
    gate.held = {"rid"}
    new = request("new", KNOWN)
    assert backend().sort_out([new]) == ([new], [])
    assert new.mm_inputs is LAID_OUT
    ready, failed = backend().sort_out([request("rid", settled(error=error))])
    assert not ready, "SGLang has it already"
    assert bool(failed) == bool(error)
    assert backend().sort_out([request("rid", KNOWN)])[1], "not an outcome"
    assert len(gate.told) == 2


# Traces.


def test_the_wait_for_items_is_a_span(claims, memory, recorded):
    leader = Leader(
        claims, SECRET, prefix=False, resume=lambda told: recorded.root if told else OFF
    )
    traced = msgspec.structs.replace(EXPECT, trace="00-told")
    leader.pass_on([request("a", traced), request("b", traced), request("c")])
    assert not recorded.ended
    claims.settle(0, memory.land(1.0))
    claims.settle(1, error=MediaError("cut off"))
    claims.settle(2, memory.land(1.0))
    assert len(leader.pass_on([])) == 3
    good, bad = recorded.named("epd_wait_for_items")
    assert said(good) == {"items": EXPECT.items}
    assert said(bad)["error.type"] == "MediaError"


def test_laying_the_prompt_out_is_a_span(leader, claims, backend, memory, assembled, recorded):
    rank = backend(span_of=lambda _request: recorded.root)
    for error in (None, MediaError("too many marks")):
        assembled.error = error
        leader.pass_on([request()])
        claims.settle(len(claims.claims) - 1, memory.land(1.0))
        rank.sort_out(leader.pass_on([]))
    good, bad = recorded.named("epd_assemble")
    assert said(good) == {"rank": 0}
    assert said(bad)["error.type"] == "BAD_REQUEST"
    assert not bad.status.description, "it may name a user's media"


# Parts of prompts.


class Parted:
    """A rank's backend that has parts, and what it lays out."""

    def __init__(self, memory, gate) -> None:
        self.laid_out: list[tuple] = []
        self.error: Exception | None = None
        self.parts = Parts(None, None, 1, Tally())
        self.backend = Backend(
            partial(memory.rank(0).receive, reader=0),
            0,
            assemble=lambda _request, _items: LAID_OUT,
            abortable=lambda r: f"abort {r.rid}",
            secret=SECRET,
            lay_out=lambda _request, _expect: LAID_OUT,
            gate=gate,
            span_of=lambda _request: OFF,
            parts=self.parts,
            lay_out_part=self.lay_out,
        )

    def lay_out(self, _request, items, expect):
        if self.error:
            raise self.error
        self.laid_out.append((items, expect))
        return LAID_OUT


@pytest.fixture
def parted(memory, gate):
    gate.announced = lambda rid: laid("ab") if rid == "parked" else None
    return Parted(memory, gate)


def laid(letters: str) -> Expect:
    keys = tuple(letter.encode() * 32 for letter in letters)
    return Expect("ticket", len(letters), 60.0, keys, (LAYOUT,) * len(letters))


def test_a_part_is_laid_out_with_the_items_that_have_landed(parted, memory):
    item = memory.land(1.0)
    part = request("r.early-1", Beginning("r", (1,), (item,)))
    assert parted.backend.sort_out([part]) == ([part], [])
    (((received,), expect),) = parted.laid_out
    assert (received.key, expect) == (item.key, None)
    assert list(part.input_ids) == LAID_OUT.input_ids
    assert part.mm_inputs is LAID_OUT
    parted.laid_out.clear()
    del received
    assert memory.drops(item)[0] == 1


def test_a_part_of_a_request_that_is_over_gives_its_items_back(parted, memory):
    item = memory.land(1.0)
    assert parted.backend.sort_out([request("r.early-1", Beginning("", (1,), (item,)))]) == ([], [])
    assert not parted.laid_out
    assert memory.drops(item)[0] == 1


def test_a_part_of_text_alone_needs_no_layout(parted):
    part = request("r.early-1", Beginning("r", (), ()), input_ids=array("q", [1]))
    assert parted.backend.sort_out([part]) == ([part], [])
    assert not parted.laid_out
    assert list(part.input_ids) == [1]


def test_covered_items_of_a_part_have_the_layouts_of_their_announcement(parted, memory):
    item = memory.land(1.0)
    part = request("parked.early-1", Beginning("parked", (0, 1), (None, item)))
    assert parted.backend.sort_out([part])[0] == [part]
    (((covered, received), expect),) = parted.laid_out
    assert (covered.key, received.key) == (b"a" * 32, item.key)
    assert expect == laid("ab")


@pytest.mark.parametrize("error", [None, MediaError("no"), ValueError("surprise")])
def test_a_part_that_cannot_be_laid_out_is_dropped_without_a_word(parted, memory, error):
    """Its request goes on, and media of one user stop no parts of others."""
    item = memory.land(1.0)
    parted.error = error
    missing = (None,) if error is None else ()
    carried = Beginning("gone", (0, 1)[: 1 + len(missing)], (item, *missing))
    assert parted.backend.sort_out([request("gone.early-1", carried)]) == ([], [])
    assert not parted.parts.broken
    assert not parted.parts.alive("gone")
    # pytest keeps the log's frames, which hold the item.
    assert error is not None or memory.drops(item)[0] == 1


@pytest.mark.parametrize("whole", ["laid out", "failed"])
def test_only_parts_of_what_can_be_laid_out_as_a_whole_may_be_to_blame(parted, memory, whole):
    """A user may write a text that a model's processor fails on."""
    parted.error = ValueError("surprise")
    part = request("r.early-1", Beginning("r", (1,), (memory.land(1.0),)))
    assert parted.backend.sort_out([part]) == ([], [])
    assert not parted.parts.broken
    outcome = settled(memory.land(1.0))
    if whole == "failed":
        outcome = Settled("", (), "MediaError", "it is damaged")
    ready, failed = parted.backend.sort_out([request("r", outcome)])
    assert (len(ready), len(failed)) == ((1, 0) if whole == "laid out" else (0, 1))
    assert parted.parts.broken is (whole == "laid out")
    assert not parted.backend._surprising


def test_a_part_of_what_was_laid_out_already_is_to_blame(parted, memory):
    parted.error = ValueError("surprise")
    carried = Beginning("parked", (0, 1), (None, memory.land(1.0)))
    assert parted.backend.sort_out([request("parked.early-1", carried)]) == ([], [])
    assert parted.parts.broken


def test_parts_of_a_request_that_fails_are_forgotten(parted, memory):
    part = request("r.early-1", Beginning("r", (1,), (memory.land(1.0),)))
    assert parted.backend.sort_out([part]) == ([part], [])
    assert parted.parts.alive("r")
    failing = request("r", Settled("", (), "MediaError", "it is damaged"))
    assert [text for _, text, _ in parted.backend.sort_out([failing])[1]] == ["it is damaged"]
    assert not parted.parts._courses


def test_a_user_may_call_a_request_like_a_part(parted, memory):
    waiting = request("r.early-1", settled(memory.land(1.0)))
    assert parted.backend.sort_out([waiting]) == ([waiting], [])
    forged = request("r.early-1")
    forged.encoder_urls = manifest.write(Beginning("r", (), ()), bytes(32))
    ready, failed = parted.backend.sort_out([forged])
    assert (ready, len(failed)) == ([], 1)
