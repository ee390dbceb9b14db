"""Videos and sounds through real children."""

from __future__ import annotations

import importlib
import io
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import soundfile

import clips
from decoding import attacks
from decoding.conftest import Make
from decoding.trees import Watch
from sglang_epd.decoding import Decoders
from sglang_epd.decoding.decoders import SMALL_BYTES
from sglang_epd.errors import DeadlineError, EpdError, MediaError, MediaTooLargeError
from sglang_epd.modality import AUDIO, MODALITIES
from waiting import reached

MARGIN = 96 << 20


def empty_wav() -> bytes:
    form = struct.pack("<HHIIHH", 1, 1, 16_000, 32_000, 2, 16)
    head = struct.pack("<4sI4s", b"RIFF", 36, b"WAVE")
    return head + struct.pack("<4sI", b"fmt ", 16) + form + struct.pack("<4sI", b"data", 0)


def frames(decoders: Decoders, data: bytes, indices: list[int], seconds: float = 60.0):
    with decoders.begin(time.monotonic() + seconds) as item:
        return item.video(data).read(indices)


def sound(decoders: Decoders, data: bytes, rate_hz: int = 16_000):
    with decoders.begin(time.monotonic() + 60) as item:
        return item.array(AUDIO, data, rate_hz)


def outcome(work, *args):
    try:
        return work(*args)
    except EpdError as error:
        return error


def nothing_is_held(decoders: Decoders) -> bool:
    return decoders.budget.used == decoders.places.used == decoders.waiting == 0


def test_a_further_kind_of_media_is_a_row_and_its_decoder(make: Make, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setitem(MODALITIES, "POINTS", None)
    importlib.reload(importlib.import_module("decoding.points"))  # which fills the row
    decoders = make()
    expected = np.arange(6, dtype=np.float32)
    with decoders.begin() as item:
        found = item.array("POINTS", expected.tobytes())
    assert (found.dtype, found.tolist()) == (np.float32, [[0, 1, 2], [3, 4, 5]])
    with decoders.begin() as item, pytest.raises(MediaError, match="no three numbers"):
        item.array("POINTS", bytes(8))
    assert nothing_is_held(decoders)


@pytest.mark.parametrize("container", ["mp4", "mov", "mkv", "webm"])
def test_a_videos_facts_and_frames(decoders: Decoders, container: str) -> None:
    data = clips.video(frames=8, size=(64, 48), container=container)
    with decoders.begin() as item:
        film = item.video(data)
        assert (film.facts.frames, film.facts.width, film.facts.height) == (8, 64, 48)
        assert film.facts.frames_per_second == pytest.approx(8.0, rel=0.01)
        every = film.read(list(range(8)))
        assert every.shape == (8, 48, 64, 3)
        assert np.array_equal(film.read([5, 2, 2, -1]), every[[5, 2, 2, 7]])
        with pytest.raises(IndexError):
            film.read([8])
    assert nothing_is_held(decoders)


def test_frames_read_are_bounded_together(strict: Decoders) -> None:
    with strict.begin() as item:
        film = item.video(clips.video(frames=8, size=(640, 480)))
        film.read([0] * 3)
        with pytest.raises(MediaTooLargeError, match="53 frames of 640 x 480 px"):
            film.read([0] * 50)


def test_one_that_holds_frames_may_have_more_before_others_begin(strict: Decoders) -> None:
    """Two of them cannot wait for each other: the second is told to try elsewhere."""
    data = clips.video(frames=8, size=(640, 480))
    decoders = strict
    with decoders.begin() as first, decoders.begin() as second, ExitStack() as stack:
        films = [item.video(data) for item in (first, second)]
        for film in films:
            film.read([0])
        pool = stack.enter_context(ThreadPoolExecutor(2))
        many = [0] * 24
        futures = [pool.submit(outcome, film.read, many) for film in films]
        reached(lambda: any(future.done() for future in futures))
        kinds = []
        for item, future in zip((first, second), futures, strict=True):
            if future.done():
                kinds.append(type(future.result()).__name__)
                item.__exit__()
        kinds += [type(future.result(60)).__name__ for future in futures]
        assert "ndarray" in kinds
    assert nothing_is_held(decoders)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"#EXTM3U\nfile:///etc/passwd", "names other files"),
        (attacks.box(b"ftyp", b"isom") + attacks.box(b"mdat", bytes(99)), "damaged or truncated"),
    ],
)
def test_what_is_no_video_is_refused(decoders: Decoders, data: bytes, told: str) -> None:
    with pytest.raises(MediaError, match=told):
        frames(decoders, data, [0])


@pytest.mark.parametrize("kept", [40, 0.1, 0.5])
@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_truncated_videos_are_refused(decoders: Decoders, container: str, kept: float) -> None:
    data = clips.video(frames=8, container=container)
    size = int(kept * len(data)) if kept < 1 else int(kept)
    with pytest.raises(MediaError):
        frames(decoders, data[:size], list(range(8)))


CLAIMS = {
    "stsz": attacks.samples_claimed(80_000_000),
    "stsz behind el": attacks.samples_claimed(80_000_000, b"\0\0el"),
    "stsz behind s": attacks.samples_claimed(80_000_000, b"\0\0\x0cs"),
    "stz2": attacks.samples_claimed(300_000_000, kind=b"stz2"),
    "stz2 behind el": attacks.samples_claimed(300_000_000, b"\0\0el", b"stz2"),
    "trun": attacks.fragments_claimed(80_000_000),
    "trun behind els": attacks.fragments_claimed(80_000_000, b"\0els"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_an_index_takes_no_more_than_a_look_may(decoders: Decoders, name: str) -> None:
    good = clips.video(frames=8, size=(64, 48))
    frames(decoders, good, [0])
    with Watch()() as watch, ThreadPoolExecutor(5) as pool:
        bad = [pool.submit(outcome, frames, decoders, CLAIMS[name], [0]) for _ in range(4)]
        fine = pool.submit(outcome, frames, decoders, good, [0, 3])
        assert not isinstance(fine.result(), EpdError)
        found = [one.result() for one in bad]
    assert all(isinstance(one, MediaError) for one in found), found
    # Three more children, which have what torch needs, are in it.
    assert watch.grown < 4 * SMALL_BYTES + MARGIN
    assert nothing_is_held(decoders)


def test_packets_that_zlib_has_made_small_take_little_memory_and_time(decoders: Decoders) -> None:
    with decoders.begin() as item:
        assert item.video(attacks.packed_packets(3)).facts.frames == 3
    bomb = attacks.packed_packets(1000)
    with Watch()() as watch:
        assert isinstance(outcome(frames, decoders, bomb, [0], 600), MediaError)
    assert watch.grown < SMALL_BYTES + 3 * len(bomb) + MARGIN
    assert nothing_is_held(decoders)


def test_a_video_whose_frames_grow_is_refused(decoders: Decoders) -> None:
    data = attacks.grows(2048)
    with Watch()() as watch:
        assert isinstance(outcome(frames, decoders, data, [0, 1, 2, 3]), MediaError)
    assert watch.grown < 4 * SMALL_BYTES + MARGIN
    assert nothing_is_held(decoders)


def test_the_log_has_the_librarys_own_error(decoders: Decoders, caplog) -> None:
    data = clips.video(frames=8, size=(64, 48))
    at = data.index(b"mdat") + 4
    end = at - 8 + int.from_bytes(data[at - 8 : at - 4])
    broken = data[:at] + bytes(end - at) + data[end:]
    assert isinstance(outcome(frames, decoders, broken, [0, 3]), MediaError)
    assert "Not decoded: 'RuntimeError: " in caplog.text


def test_large_videos_wait_for_memory_and_small_ones_pass(strict: Decoders) -> None:
    decoders = strict
    large, small = clips.video(frames=8, size=(1280, 720)), clips.video(frames=8, size=(64, 48))
    with decoders.begin() as holder, ThreadPoolExecutor(3) as pool:
        holder.video(large).read(list(range(8)))
        waiting = [pool.submit(outcome, frames, decoders, large, [0] * 16) for _ in range(2)]
        reached(lambda: decoders.waiting >= 2)
        with decoders.begin() as item:
            assert item.video(small).facts.frames == 8
        holder.__exit__()
        for one in waiting:
            assert one.result().shape == (16, 720, 1280, 3)
    assert nothing_is_held(decoders)


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_sounds_are_samples_of_one_rate(decoders: Decoders, container: str) -> None:
    made = sound(decoders, clips.audio(container=container, rate_hz=44_100, seconds=2.5))
    assert made.dtype == np.float32
    assert len(made) == pytest.approx(2.5 * 16_000, rel=0.05)
    assert nothing_is_held(decoders)


def flac(seconds: int, rate_hz: int = 16_000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros((rate_hz * seconds, channels), np.int16), rate_hz, format="FLAC")
    return file.getvalue()


@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_long_sounds_are_refused(strict: Decoders, container: str) -> None:
    with pytest.raises(MediaTooLargeError, match="longer than 3 s, the limit"):
        sound(strict, clips.audio(container=container, seconds=4.0))


def without_length(data: bytes) -> bytes:
    """A FLAC file whose header does not tell how many samples follow, as of a live recording."""
    return data[:21] + bytes([data[21] & 0xF0, 0, 0, 0, 0]) + data[26:]


@pytest.mark.parametrize("seconds", [4, 3600])
def test_long_sounds_that_do_not_say_so_are_refused_and_not_read(
    strict: Decoders, seconds: int
) -> None:
    with Watch()() as watch, pytest.raises(MediaTooLargeError, match="longer than 3 s, the limit"):
        sound(strict, without_length(flac(seconds)))
    assert watch.grown < MARGIN
    assert len(sound(strict, without_length(flac(2)))) == 2 * 16_000


@pytest.mark.parametrize("data", [flac(3600), flac(60, 192_000, 8)])
def test_sounds_stay_within_their_memory(decoders: Decoders, data: bytes) -> None:
    sound(decoders, clips.audio())
    with Watch()() as watch:
        outcome(sound, decoders, data)
    # Its own samples are charged for ten minutes; FFmpeg and its resampler for little more.
    assert watch.grown < (179 << 20) + MARGIN
    assert nothing_is_held(decoders)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"#EXTM3U\nfile:///etc/passwd", "not an audio file"),
        (b"fLaC" + bytes(100), "damaged"),
        (empty_wav(), "no sound|damaged"),
        (clips.audio()[:30], "damaged|no sound"),
    ],
)
def test_what_is_no_sound_is_refused(decoders: Decoders, data: bytes, told: str) -> None:
    with pytest.raises(MediaError, match=told):
        sound(decoders, data)


def test_a_video_has_a_deadline(decoders: Decoders) -> None:
    with pytest.raises(DeadlineError):
        frames(decoders, clips.video(frames=8), [0], 0.001)
    assert nothing_is_held(decoders)


def test_an_index_that_takes_quadratic_time_is_ended(decoders: Decoders) -> None:
    with pytest.raises(MediaError, match="crashed, or took too long"):
        frames(decoders, attacks.packets_of_a_byte(220_000), [0], 600)
    with decoders.begin() as item:
        assert item.video(attacks.packets_of_a_byte(5_000)).facts.frames > 0
    assert nothing_is_held(decoders)
