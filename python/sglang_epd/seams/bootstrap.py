"""A prefill server's layouts, served beside SGLang's bootstrap routes.

Leans on `disaggregation.common.conn.CommonKVBootstrapServer._setup_routes`, which every
transfer backend's bootstrap server runs in its constructor, before its thread starts to
serve `self.app` (aiohttp).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_epd.language.layouts import Board

_BOARD = "_sglang_epd_layouts"


def serve_layouts(_result: None, server: Any) -> None:
    """After `_setup_routes`: add ours on a `--language-only` server.

    Not where some media are laid out elsewhere, because who asks for those would be kept
    waiting: `--enable-adaptive-dispatch-to-encoder` keeps them from the encoders, and
    several tokenizer workers are other processes than this one.
    """
    from sglang.srt.runtime_context import get_disagg, get_serving

    disagg = get_disagg()
    if not disagg.language_only or disagg.enable_adaptive_dispatch_to_encoder:
        return
    if get_serving().tokenizer_worker_num > 1:
        return
    from sglang_epd.language.layout_route import PATH, LayoutRoute
    from sglang_epd.language.layouts import Board
    from sglang_epd.seams import discovery

    board = Board()
    setattr(server, _BOARD, board)
    server.app.router.add_get(PATH, LayoutRoute(board, discovery.trust()).handle)


def board_of(server: Any) -> Board | None:
    """Where the layouts are written that a manager's bootstrap server serves, if it does."""
    board: Board | None = getattr(server, _BOARD, None)
    return board
