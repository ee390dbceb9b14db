"""Makes a tokenizer process's `mm_receiver` of what this server is told: its flags, settings and
checkpoint."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from sglang_epd import logs
from sglang_epd.checkpoint import processing, served
from sglang_epd.config import Settings
from sglang_epd.dispatch.client import EncoderClient
from sglang_epd.dispatch.dispatcher import Dispatcher, Patience
from sglang_epd.dispatch.policies import policy
from sglang_epd.dispatch.pool import Health, Pool
from sglang_epd.dispatch.work import Costs, describe
from sglang_epd.families import Family, family_of, takes_options
from sglang_epd.language.frontend import Frontend
from sglang_epd.language.planner import content_key, plan
from sglang_epd.namespace import namespace
from sglang_epd.observability.language import DispatchTally
from sglang_epd.seams import adaptive, bootstrap, embeddings, receiving, roles, rundir
from sglang_epd.seams.identities import plan_without_options
from sglang_epd.seams.prompt import lays_out
from sglang_epd.seams.tokenizer import TokenizerSeam
from sglang_epd.transfer.control import Control

logger = logging.getLogger(__name__)


def create_frontend(
    server_args: Any, dtype: Any = None, hf_config: Any = None, encode_urls: Any = None
) -> TokenizerSeam:
    """Stands in for `create_mm_receiver` in the tokenizer process."""
    from sglang.srt.runtime_context import (
        get_disagg,
        get_memory,
        get_mm,
        get_parallel,
        get_serving,
    )

    settings = Settings.from_env()
    logs.install()
    embeddings.give_field()
    checkpoint = served(whole=settings.fingerprint == "full")
    form = str(dtype).removeprefix("torch.")
    identity = namespace(hf_config, checkpoint, form, processing())
    logger.info(
        "EPD language server: namespace %s, encoders %s", identity, encode_urls or "none yet"
    )
    tally = DispatchTally(
        identity, (state.value for state in Health if state is not Health.GONE), roles.registry()
    )
    pool, costs = _pool(identity, tally), Costs()
    dispatcher = _dispatcher(settings, pool, costs, tally)
    if get_disagg().encoder_transfer_backend == "zmq_to_tokenizer":
        workers = get_serving().tokenizer_worker_num
        if workers > 1:
            rundir.draw_folder()
        bootstrap.ends_with_its_server(receiving.start(readers=1, receivers=workers).stop)
    control = Control(rundir.control_path())
    timeout_s = settings.request_timeout_s
    # Where the tokenizer receives, the scheduler hears of a request when its items are there;
    # where a prompt may be encoded here, when one of them is.
    to_scheduler = get_disagg().encoder_transfer_backend != "zmq_to_tokenizer"
    adapts = get_disagg().enable_adaptive_dispatch_to_encoder
    asks_prefix = receiving.asks_prefix(get_parallel(), get_memory().disable_radix_cache)
    frontend = Frontend(
        dispatcher,
        control,
        timeout_s,
        key=lambda item: content_key(item, identity),
        ask_prefix=to_scheduler and not adapts and asks_prefix,
        first_item=to_scheduler and adapts and settings.prefill_early != "off",
        tally=tally,
    )
    architecture = hf_config.architectures[0]
    lay_out = None if to_scheduler else partial(lays_out, architecture=architecture)
    limits = get_mm().limit_mm_data_per_request or {}
    planner = partial(plan, limits=limits)
    if not takes_options(architecture):
        family = family_of(architecture) or Family()
        planner = partial(plan_without_options, family=family, limits=limits)
    seam = TokenizerSeam(
        frontend,
        control,
        timeout_s,
        lays_out=lay_out,
        plan=planner,
        observe_lag=partial(tally.observe, "loop_lag_seconds", kind="tokenizer"),
        tells_sources=settings.tell_sources,
        secret=rundir.secret(),
    )
    control.listen(seam.send_again)
    seam.adaptive = adaptive.create(frontend, pool, settings, planner)
    return seam


def _pool(identity: str, tally: DispatchTally) -> Pool:
    """The encoders of this server, found and watched from now on."""

    def on_move(url: str, old: Health | None, new: Health, why: str) -> None:
        tally.moved(old.value if old else None, new.value, stays=new is not Health.GONE)
        ill = new in (Health.SUSPECT, Health.OPEN, Health.MISFIT)
        level = logging.WARNING if ill else logging.INFO
        logger.log(level, "Encoder %s: %s%s", url, new.value, f" ({why})" if why else "")

    pool = Pool(identity, on_move=on_move)
    bootstrap.start(pool, partial(tally.observe, "loop_lag_seconds", kind="watcher"))
    return pool


def _dispatcher(settings: Settings, pool: Pool, costs: Costs, tally: DispatchTally) -> Dispatcher:
    trust = bootstrap.trust()
    return Dispatcher(
        EncoderClient(trust.token, trust.client_ssl()),
        pool,
        policy(settings.dispatch_policy),
        describe=lambda items: describe(items, costs),
        learn=costs.learn,
        patience=Patience(settings.encoder_wait_s, settings.encoder_timeout_s),
        tally=tally,
    )
