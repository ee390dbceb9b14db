"""How the servers on one machine share its cores."""

from __future__ import annotations

import os
import threading

import torch


def wait_passively() -> None:
    """Let OpenMP threads sleep while they wait for each other, instead of spinning.

    libgomp spins at every barrier as if the machine were its own. With more busy
    threads than cores, and a second server or a client is enough, each barrier burns
    the slice of the thread it waits for: eight layers of 1024 patches took 450 ms
    beside one busy process on two cores, and 70 ms with the policy, which costs nothing
    when alone. Processes started from here read the policy from the environment. This
    one loaded libgomp before, so libgomp gets the policy by a call: it spins briefly when it
    manages more threads than there are cores, and a parked thread that has run one
    parallel operation keeps its own team counted.
    """
    if "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if torch.get_num_threads() > 1:
        threading.Thread(target=_park, name="libgomp-oversubscription", daemon=True).start()


def _park() -> None:
    torch.zeros(1 << 20).add_(1)  # large enough to run in parallel
    threading.Event().wait()


def choose_binding(*, ranks: int) -> None:
    """Give each rank a share of the cores where there is not a NUMA node for each.

    SGLang refuses to start such ranks unless `SGLANG_CPU_OMP_THREADS_BIND` names the
    cores of each. A single rank is left unbound: several servers share a small machine,
    and the kernel places their threads better than a guess.
    """
    if ranks <= 1 or "SGLANG_CPU_OMP_THREADS_BIND" in os.environ:
        return
    from sglang.srt.utils.common import get_cpu_ids_by_node

    if ranks > len(get_cpu_ids_by_node()):
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = binding(sorted(os.sched_getaffinity(0)), ranks)


def binding(cores: list[int], ranks: int) -> str:
    """Core lists of the ranks, `0,1|2,3`; shared in turn if there are fewer cores than ranks.

    >>> binding([0, 1, 2, 3], 2)
    '0,1|2,3'
    """
    share = max(1, len(cores) // ranks)
    lists = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(map(str, cores_of_rank)) for cores_of_rank in lists)
