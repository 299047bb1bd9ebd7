"""Runs a function in several gloo processes from an ordinary test.

They are forked from a server that has imported what takes seconds: an interpreter each would cost most of a test.
"""

import atexit
import multiprocessing
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from multiprocessing import forkserver

# conftest chooses Triton's interpreter before anything imports Triton.
PRELOADED = ["tests.conftest", "fused_rl", "torch.distributed.fsdp", "deepspeed", "transformers"]
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)
# Waited for: its seconds are ours, and nothing outlives the tests.
atexit.register(forkserver._forkserver._stop)


def _rank(work, environment, rank, world, folder, results, timeout):
    os.environ.clear()
    os.environ.update(environment)  # the caller's, not that of the server's start
    # What torchrun would set; deepspeed.init_distributed reads it too.
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({k: str(v) for k, v in ranks.items()})
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", TORCHDYNAMO_DISABLE="1")
    status, value = "raised", None
    try:
        from datetime import timedelta

        import torch

        torch.set_num_threads(1)
        store = f"file://{folder}/rendezvous"  # no port, so no two tests collide
        torch.distributed.init_process_group(
            "gloo",
            init_method=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        fn, args = pickle.loads(work)
        status, value = "returned", fn(rank, world, *args)
        torch.distributed.barrier()
    except BaseException:
        status, value = "raised", traceback.format_exc()
    results.put((rank, status, value))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    # An ordinary exit races with gloo's threads and aborts now and then.
    os._exit(0 if status == "returned" else 1)


def _collect(processes, results, timeout):
    returned, end = {}, time.monotonic() + timeout
    while len(returned) < len(processes):
        try:
            rank, status, value = results.get(timeout=0.2)
        except queue.Empty:
            codes = [p.exitcode for p in processes]
            if any(code not in (None, 0) for code in codes) and results.empty():
                raise RuntimeError(f"a rank died without a word; exit codes {codes}") from None
            if time.monotonic() > end:
                missing = sorted(set(range(len(processes))) - set(returned))
                raise TimeoutError(f"no result from ranks {missing} within {timeout} s") from None
            continue
        if status == "raised":
            raise RuntimeError(f"rank {rank} raised\n{value}")
        returned[rank] = value
    return [returned[rank] for rank in range(len(processes))]


def ragged_batches(lengths):
    """Micro-batches of two sequences of these lengths: [(token ids (2, n + 1), advantages (2, n))] for each rank."""
    import torch

    generator = torch.Generator().manual_seed(3)

    def batch(n):
        return torch.randint(131, (2, n + 1), generator=generator), torch.randn(
            2, n, generator=generator
        )

    ranks = []
    for of_rank in lengths:
        ranks.append([batch(n) for n in of_rank])
    return ranks


def zero_engine(model, optimizer, stage, **zero):
    """A DeepSpeed engine that partitions the smallest parameter, too."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled for collectives in shared memory
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def run_distributed(fn, world, *args, timeout=120):
    """`[fn(rank, world, *args) for each rank]`, each in a process of a gloo group of `world`.

    `fn` is a function at the top of a module, and its results can be pickled (tensors: `.tolist()` or `.numpy()`).
    A rank that raises, dies or hangs for more than `timeout` s fails the caller, and no process outlives the call.
    """
    results, work = PROCESSES.Queue(), pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world):
            given = (work, dict(os.environ), rank, world, folder, results, timeout)
            processes.append(PROCESSES.Process(target=_rank, args=given, daemon=True))
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, timeout)
        finally:
            for process in processes:
                process.join(0.5)
                if process.is_alive():
                    process.kill()
                    process.join()
