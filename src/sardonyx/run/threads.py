"""One thread pool for all sessions."""

from __future__ import annotations

import logging
from functools import cache

import torch

from sardonyx.run.ortvalue import binding

log = logging.getLogger(__name__)


@cache
def use_global_pool() -> bool:
    """Give ONNX Runtime one pool as large as torch's. False if its environment was made before we came.

    A session with threads of its own costs 2.9 ms to make instead of 0.16, and many such pools fight over the cores.
    """
    threads = torch.get_num_threads()
    try:
        binding().set_global_thread_pool_sizes(threads, 1)
    except Exception as error:
        log.info("sessions get threads of their own: %s", error)
        return False
    log.debug("global thread pool of %d", threads)
    return True
