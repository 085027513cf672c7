"""Cuts read into memory, and stretched to a length.

A worst-case example is a real cut of the user's, lengthened (or shortened) until it sits at the edge of its bucket.
Whatever a dataset may look at comes along: audio keeps its sampling rate and its channels, features their frame
shift and their dtype, supervisions their number, their ids' uniqueness and their recording id, alignments and custom
arrays their place in time. The signal is repeated, never filled up with zeros, so that a model which normalises
by energy sees the numbers that it is used to.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import soundfile
from lhotse.array import Array, TemporalArray, seconds_to_frames
from lhotse.audio import AudioSource, Recording
from lhotse.cut import Cut, MixedCut, MonoCut, MultiCut, PaddingCut
from lhotse.cut.data import DataCut
from lhotse.features.io import MemoryRawWriter
from lhotse.supervision import SupervisionSegment
from lhotse.utils import compute_num_frames, fastcopy

from lhotse_oomfit.errors import WorstCaseError
from lhotse_oomfit.transcript import spread_alignment

__all__ = ["PlainCut", "clone", "independent", "num_samples_at"]

_OWNER_CUT = -1  # the key of the cut's own custom dict; supervisions are keyed by their index
_MAX_COPIES = 1 << 18  # that distinct texts are wanted for
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of a text that is one letter repeated
_SILENCE_LEVEL = 1e-3  # noise put in the place of digital silence, about -60 dBFS


def num_samples_at(length_s: float, sampling_rate: int) -> int:
    """Return the largest number of samples that lasts at most ``length_s`` seconds.

    Lhotse's ``compute_num_samples`` rounds to the nearest, and can so land in the next bucket.
    """
    num = math.floor(round(length_s * sampling_rate, ndigits=6))
    while num > 1 and num / sampling_rate > length_s:
        num -= 1
    return max(num, 1)


@dataclass(frozen=True, kw_only=True)
class PlainCut:
    """A cut with one recording at most, starting at zero, and everything that it refers to read into memory.

    :param cut: the cut; its manifests describe the original data.
    :param audio: float32, ``(channels, samples)``; None without a recording.
    :param features: ``(frames, ...)``; None without precomputed features.
    :param arrays: custom arrays, by owner (-1 is the cut, otherwise the supervision's index) and name.
    :param recordings: custom recordings of the cut, by name, ``(channels, samples)``.
    """

    cut: DataCut
    audio: np.ndarray | None
    features: np.ndarray | None
    arrays: Mapping[tuple[int, str], np.ndarray] = field(default_factory=dict)
    recordings: Mapping[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def read(cls, cut: Cut) -> PlainCut:
        """Read ``cut`` into memory; a mix is mixed down to what it sounds like, on as many channels as it has.

        :raises WorstCaseError: if the cut isn't one that can be stretched: padding alone, video, no data.
        :raises Exception: whatever reading the data raises.
        """
        if isinstance(cut, PaddingCut) or not isinstance(cut, (DataCut, MixedCut)):
            raise WorstCaseError(
                f"a {type(cut).__name__} ({getattr(cut, 'id', '?')!r}) can't be stretched into a worst-case example; "
                "give cuts with audio or features, or pass make_batch"
            )
        if cut.has_video:
            raise WorstCaseError(f"cut {cut.id!r} holds video, which can't be stretched; pass make_batch")
        if not (cut.has_recording or cut.has_features):
            raise WorstCaseError(f"cut {cut.id!r} has neither audio nor features to stretch; pass make_batch")
        cut = independent(cut)
        audio, features = _load_either(cut)
        plain = _flatten_mix(cut, audio, features) if isinstance(cut, MixedCut) else cut
        if audio is None or features is None:
            plain = fastcopy(
                plain,
                recording=plain.recording if audio is not None else None,
                features=plain.features if features is not None else None,
            )
        arrays: dict[tuple[int, str], np.ndarray] = {}
        recordings: dict[str, np.ndarray] = {}
        for owner, holder in [(_OWNER_CUT, plain), *enumerate(plain.supervisions)]:
            for name, value in (holder.custom or {}).items():
                if isinstance(value, (Array, TemporalArray)):
                    arrays[owner, name] = cut.load_custom(name) if owner == _OWNER_CUT else holder.load_custom(name)
                elif isinstance(value, Recording) and owner == _OWNER_CUT and not plain.custom.get(f"{name}_unaligned"):
                    recordings[name] = cut.load_custom(name)
        return cls(cut=plain, audio=audio, features=features, arrays=arrays, recordings=recordings)

    @property
    def sampling_rate(self) -> int:
        """Hz, of the recording where there is one: the grid that lengths are rounded to."""
        rate = self.cut.recording.sampling_rate if self.cut.recording is not None else self.cut.sampling_rate
        return int(rate)

    def stretched(self, num_samples: int) -> DataCut:
        """Return the cut in memory, ``num_samples`` long at :attr:`sampling_rate`, texts and tokens as they were."""
        duration = num_samples / self.sampling_rate
        cut = self.cut
        channels = list(cut.channel) if isinstance(cut.channel, (list, tuple)) else [cut.channel]
        recording = features = None
        if self.audio is not None:
            recording = _memory_recording(cut.recording, self.audio, channels, num_samples)
        if self.features is not None:
            frames = compute_num_frames(duration, cut.features.frame_shift, cut.features.sampling_rate)
            array = _repeat(self.features, max(frames, 1), axis=0)
            features = fastcopy(
                cut.features,
                start=0.0,
                duration=duration,
                num_frames=array.shape[0],
                channels=cut.channel,
                **_stored(array),
            )
        custom: dict[str, Any] = dict(cut.custom or {})
        for name, samples in self.recordings.items():
            original = cut.custom[name]
            num = num_samples_at(duration, original.sampling_rate)
            chosen = cut.custom.get(f"{name}_channel_selector")
            ids = original.channel_ids if chosen is None else ([chosen] if isinstance(chosen, int) else list(chosen))
            custom[name] = _memory_recording(original, samples, list(ids), num)
        for (owner, name), array in self.arrays.items():
            if owner == _OWNER_CUT:
                custom[name] = _memory_array(cut.custom[name], array, cut.duration, duration)
        return fastcopy(
            cut,
            start=0.0,
            duration=duration,
            recording=recording,
            features=features,
            custom=custom or cut.custom,
            supervisions=self._supervisions(duration),
        )

    def _supervisions(self, duration: float) -> list[SupervisionSegment]:
        """Spread the supervisions over ``duration``; a single one fills it, several keep their proportions."""
        spans = []
        for sup in self.cut.supervisions:
            start = min(max(sup.start, 0.0), self.cut.duration)
            spans.append((start, max(min(sup.end, self.cut.duration) - start, 0.0)))
        if len(spans) == 1:
            spans = [(0.0, self.cut.duration)]
        last = max((start + length for start, length in spans), default=0.0) or 1.0
        ratio = duration / last
        placed = []
        for index, (sup, (start, length)) in enumerate(zip(self.cut.supervisions, spans, strict=True)):
            new_start = round(start * ratio, ndigits=8)
            new = fastcopy(
                sup,
                start=new_start,
                duration=max(round(min(length * ratio, duration - new_start), ndigits=8), 1e-8),
                recording_id=self.cut.recording_id,
                custom=dict(sup.custom) if sup.custom is not None else None,
            )
            for (owner, name), array in self.arrays.items():
                if owner == index:
                    new.custom[name] = _memory_array(sup.custom[name], array, sup.duration, new.duration)
            placed.append(spread_alignment(new, 1.0))
        return placed


def independent(cut: Cut) -> Cut:
    """Return a shallow copy that shares no mutable manifest with ``cut``; some of Lhotse's transforms write to cuts."""
    if isinstance(cut, MixedCut):
        return fastcopy(cut, tracks=[fastcopy(track, cut=independent(track.cut)) for track in cut.tracks])
    if isinstance(cut, DataCut):
        supervisions = [fastcopy(sup, custom=_copied(sup.custom)) for sup in cut.supervisions]
        return fastcopy(cut, custom=_copied(cut.custom), supervisions=supervisions)
    return copy.copy(cut)


def clone(cut: DataCut, index: int, *, distinct: bool = False) -> DataCut:
    """Return copy number ``index`` of ``cut``: ids of its own, custom dicts of its own, the same data in memory.

    :param distinct: give it a recording id and a text of its own, too, for datasets that drop repetitions.
    """
    suffix = f"-worst{index}"
    changes: dict[str, Any] = {}
    shared_id = cut.recording_id
    if distinct:
        shared_id = f"{shared_id}{suffix}"
        if cut.recording is not None:
            changes["recording"] = fastcopy(cut.recording, id=shared_id)
        if cut.features is not None:
            changes["features"] = fastcopy(cut.features, recording_id=shared_id)
    return fastcopy(
        cut,
        id=f"{cut.id}{suffix}",
        custom=_copied(cut.custom),
        supervisions=[
            fastcopy(
                sup,
                id=f"{sup.id}{suffix}",
                recording_id=shared_id,
                text=_distinct_text(sup.text, index) if distinct else sup.text,
                custom=_copied(sup.custom),
            )
            for sup in cut.supervisions
        ],
        **changes,
    )


def _copied(custom: dict[str, Any] | None) -> dict[str, Any] | None:
    if custom is None:
        return None
    return {name: copy.copy(value) if isinstance(value, (list, dict, set)) else value for name, value in custom.items()}


def _distinct_text(text: str | None, index: int) -> str | None:
    """Overwrite the end of ``text`` by the number, spelled in its own letters, so that as many characters stay."""
    if not text:
        return text
    letters = sorted({char for char in text if not char.isspace()})
    if len(letters) < 2:
        letters = list(_LETTERS)
    code, numbered = "", 1
    while numbered < _MAX_COPIES and len(code) < len(text):
        index, digit = divmod(index, len(letters))
        code += letters[digit]
        numbered *= len(letters)
    return text[: len(text) - len(code)] + code


def _load_either(cut: Cut) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Read audio and features; where a cut has both, the dataset may need one only, so one may be unreadable."""
    audio = features = None
    try:
        audio = cut.load_audio() if cut.has_recording else None
    except Exception:
        if not cut.has_features:
            raise
    try:
        features = cut.load_features() if cut.has_features else None
    except Exception:
        if audio is None:
            raise
    return audio, features


def _flatten_mix(cut: MixedCut, audio: np.ndarray | None, features: np.ndarray | None) -> DataCut:
    """Describe what ``cut`` sounds like as one plain cut; the data are in the arrays read by the caller."""
    first = next(track.cut for track in cut.tracks if isinstance(track.cut, DataCut))
    num_channels = audio.shape[0] if audio is not None else int(first.num_channels or 1)
    several = num_channels > 1
    channel: Any = list(range(num_channels)) if several else 0
    recording = None
    if audio is not None:
        recording = Recording(
            id=first.recording_id,
            sources=[AudioSource(type="memory", channels=list(range(num_channels)), source=b"")],
            sampling_rate=cut.sampling_rate,
            num_samples=audio.shape[1],
            duration=audio.shape[1] / cut.sampling_rate,
        )
    manifest = None
    if features is not None:
        manifest = fastcopy(
            first.features,
            start=0.0,
            duration=cut.duration,
            num_frames=features.shape[0],
            recording_id=first.recording_id,
            channels=channel,
        )
    kind = MultiCut if several else MonoCut
    return kind(
        id=cut.id,
        start=0.0,
        duration=cut.duration,
        channel=channel,
        supervisions=[
            fastcopy(sup, channel=channel if not several else sup.channel, recording_id=first.recording_id)
            for sup in cut.supervisions
        ],
        features=manifest,
        recording=recording,
        custom=dict(cut.custom or {}) or None,
    )


def _memory_recording(original: Recording, samples: np.ndarray, channels: list[int], num_samples: int) -> Recording:
    stream = BytesIO()
    stretched = _repeat(np.atleast_2d(samples), num_samples, axis=1)
    soundfile.write(stream, stretched.T, original.sampling_rate, format="WAV", subtype="FLOAT")
    return Recording(
        id=original.id,
        sources=[AudioSource(type="memory", channels=channels, source=stream.getvalue())],
        sampling_rate=original.sampling_rate,
        num_samples=num_samples,
        duration=num_samples / original.sampling_rate,
        channel_ids=channels,
    )


def _memory_array(original: Array | TemporalArray, array: np.ndarray, old_s: float, new_s: float) -> Any:
    if isinstance(original, Array):
        return Array(shape=list(array.shape), **_stored(array))
    num_old = array.shape[original.temporal_dim]
    num_new = seconds_to_frames(new_s, original.frame_shift)
    if abs(num_old - seconds_to_frames(old_s, original.frame_shift)) > 1:
        # The declared frame shift isn't the true one, so the array's own density is what counts.
        num_new = math.ceil(num_old * new_s / max(old_s, 1e-8))
    array = _repeat(array, max(num_new, 1), axis=original.temporal_dim)
    return TemporalArray(
        array=Array(shape=list(array.shape), **_stored(array)),
        temporal_dim=original.temporal_dim,
        frame_shift=original.frame_shift,
        start=0.0,
    )


def _stored(array: np.ndarray) -> dict[str, Any]:
    writer = MemoryRawWriter()
    return {"storage_type": writer.name, "storage_path": "", "storage_key": writer.write("", array)}


def _repeat(array: np.ndarray, num: int, *, axis: int) -> np.ndarray:
    """Repeat ``array`` along ``axis`` until it has ``num`` entries; digital silence becomes faint noise."""
    if array.shape[axis] == 0:
        array = np.zeros([1 if dim == axis else size for dim, size in enumerate(array.shape)], dtype=array.dtype)
    repeated = np.take(array, np.arange(num) % array.shape[axis], axis=axis)
    if np.issubdtype(array.dtype, np.floating) and not array.any():
        noise = np.random.default_rng(0).standard_normal(repeated.shape) * _SILENCE_LEVEL
        repeated = repeated + noise.astype(array.dtype)
    return np.ascontiguousarray(repeated)
