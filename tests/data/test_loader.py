"""Worker processes that hand batches over in shared memory: the same stream, whoever makes it and whatever happens."""

from __future__ import annotations

import collections
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.loader import data_loader
from fat5.data.shared_slots import SlotPool
from fat5.data.token_dataset import TokenDataset
from fat5.errors import ConfigError, DataError
from tests.data import denoising_reference as reference

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PACKED = DenoisingConfig(max_input_length=64, max_target_length=64, encoder_budget=512, look_ahead=32)
CONFIGS = {
    "packed": PACKED,
    "padded": DenoisingConfig(layout="padded", max_input_length=64, batch_size=8),
    "longest": DenoisingConfig(layout="padded", max_input_length=64, batch_size=8, pad_to="longest"),
    "concat": DenoisingConfig(layout="concat", max_input_length=64, max_target_length=48, batch_size=8),
}
LENGTHS = [0, 1, 2, 700, *(2 + 37 * number % 117 for number in range(200))]
TOKENS = TokenDataset.from_lists([list(range(300, 300 + length)) for length in LENGTHS], vocab_size=4096)


def dataset(config: DenoisingConfig = PACKED, **options) -> DenoisingDataset:
    return DenoisingDataset(TOKENS, reference.special_tokens(), config, **{"epochs": 1, **options})


def content(batch: dict) -> tuple:
    return tuple(
        (name, value.dtype, tuple(value.shape), tuple(value.flatten().tolist()))
        if isinstance(value, torch.Tensor)
        else (name, value)
        for name, value in sorted(batch.items())
    )


def contents(batches) -> list[tuple]:
    # One at a time, so that slots are used again while others are read.
    return [content(batch) for batch in batches]


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_batches_are_those_of_no_worker(layout, num_workers):
    """Pitfall: the stream hangs on the number of workers."""
    source = dataset(CONFIGS[layout], epochs=3)
    alone = contents(source)
    assert len(alone) > 30
    assert contents(data_loader(source, num_workers=0)) == alone
    assert contents(data_loader(source, num_workers=num_workers)) == alone
    assert len(data_loader(source)) == len(alone)


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_persistent_workers_serve_every_iteration(context, num_workers):
    source = dataset(epochs=2)
    alone = contents(source)
    loader = data_loader(source, num_workers=num_workers, persistent_workers=True, multiprocessing_context=context)
    assert contents(loader) == alone
    workers = {process.pid for process in multiprocessing.active_children()}
    given_up = iter(loader)
    assert contents(itertools.islice(given_up, 3)) == alone[:3]
    assert contents(loader) == alone
    assert {process.pid for process in multiprocessing.active_children()} == workers
    loader.close()
    gc.collect()
    assert not multiprocessing.active_children()


def test_endless_stream_resumes_anywhere_for_a_rank():
    options = {"epochs": None, "rank": 1, "world_size": 2}
    expected = contents(itertools.islice(iter(dataset(**options)), 60))
    loader = data_loader(dataset(**options, start_batch=23), num_workers=2)
    assert contents(itertools.islice(iter(loader), 37)) == expected[23:]
    with pytest.raises(TypeError, match="has no length"):
        len(loader)


def test_batches_that_are_kept_stay_as_they_were():
    """Every batch of the stream is held at once, many times more than there are slots."""
    source = dataset(epochs=8)
    loader = data_loader(source, num_workers=2, prefetch_factor=2)
    kept = list(loader)
    assert len(kept) > 100
    assert contents(kept) == contents(source)


def test_a_batch_is_the_consumers_own_and_outlives_the_loader():
    source = dataset(epochs=2)
    batches = iter(data_loader(source, num_workers=1))
    first = next(batches)
    kept = first["labels"][5:]
    first["input_ids"].zero_()
    del first
    rest = contents(batches)
    del batches
    gc.collect()
    assert rest == contents(source)[1:]
    assert torch.equal(kept, next(iter(source))["labels"][5:])


def test_slots_are_free_again_once_their_tensors_are_gone():
    pool = SlotPool(slot_bytes=4096, num_slots=2)
    slots = [pool.acquire(), pool.acquire()]
    assert pool.acquire() is None
    filled = pool.write(slots[0], 16, lambda allocate: {"a": torch.from_numpy(allocate(4)).fill_(7), "n": 3})
    arrived = filled.__reduce__()[0](*filled.__reduce__()[1])
    batch = arrived.batch()
    view = batch["a"][1:]
    del arrived, batch
    assert pool.free_slots == 0
    assert view.tolist() == [7, 7, 7]
    del view
    assert pool.free_slots == 1


def test_a_killed_worker_is_one_clear_error():
    batches = iter(data_loader(dataset(epochs=None), num_workers=2))
    next(batches)
    victim = multiprocessing.active_children()[0].pid
    # From another thread, so that the reading is under way.
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    with pytest.raises(DataError, match=rf"ended abruptly, .*use fewer workers .*{victim}"):
        collections.deque(batches, maxlen=0)


def test_workers_leave_the_terminals_signals_to_the_main_process():
    """Pitfall: Ctrl+C reaches the whole group and kills the workers before the last checkpoint is written."""
    batches = iter(data_loader(dataset(epochs=None), num_workers=2))
    expected = contents(itertools.islice(iter(dataset(epochs=None)), 120))
    # So many that both workers have started.
    got = contents(itertools.islice(batches, 41))
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
    assert got + contents(itertools.islice(batches, 79)) == expected


def test_a_script_ends_at_once_though_its_iteration_is_open():
    script = """
        from tests.data.test_loader import data_loader, dataset
        if __name__ == "__main__":
            batches = iter(data_loader(dataset(epochs=None), num_workers=2))
            next(batches)
            print("done", flush=True)
    """
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "done\n"
    assert "Error" not in result.stderr
    assert time.monotonic() - started < 45


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": -1}, "num_workers must be 0 or more, got -1"),
        ({"prefetch_factor": 0}, "prefetch_factor must be 1 or more, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        data_loader(dataset(), **settings)
