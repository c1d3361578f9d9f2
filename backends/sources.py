"""Where conversations and tokenised rows come from: JSONL, JSON, Parquet, `save_to_disk` folders, and folders of those.

A `Source` is read twice: once from end to end, then record by record in any order. Nothing is held but places.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from backends.errors import JobError, one_line

# What a folder is searched for, in it and below it. Hidden files, and files in hidden folders, are not looked at.
SUFFIXES = (".jsonl", ".json", ".parquet")
_GIVE = "give JSONL, JSON or Parquet files, or folders of them"
# Files of lines that are kept open: a folder may hold more than a process may have open.
_OPEN = 64


class SourceError(JobError):
    """A file of conversations or rows that cannot be read: names the file, the record and the remedy."""


class Place(NamedTuple):
    """Where a record stands. at: a byte offset or a row's index; number: what a person counts, from 1."""

    at: int
    number: int


class Source(Protocol):
    """Records in one file or folder. name: as shown; unit: what its records are called, as "line"."""

    name: str
    unit: str

    def scan(self) -> Iterator[tuple[Place, bytes]]:
        """Every record that is not blank, in order, with bytes that are the same for the same content."""

    def parse(self, place: Place, content: bytes) -> dict[str, Any]:
        """The record of what `scan` gave. Raises SourceError where it is no JSON object."""

    def record(self, place: Place) -> dict[str, Any]:
        """The record at a place, read anew. Raises SourceError."""

    def sha256(self) -> str:
        """Of the contents, known after a whole scan."""


def open_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources of files and folders, in the order given, a folder's by name. Raises SourceError."""
    found: list[Source] = []
    opened: deque[JsonLines] = deque()
    for name in inputs:
        path = Path(name)
        if not path.is_dir():
            found.append(_of_file(path, name, opened))
        elif _is_dataset(path):
            found.append(DatasetRows(name))
        else:
            files = sorted(
                file
                for file in path.rglob("*")
                if file.suffix in SUFFIXES
                and file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            )
            if not files:
                raise SourceError(f"the folder {name} holds no {', '.join(SUFFIXES)} file", _GIVE)
            found.extend(_of_file(file, str(file), opened) for file in files)
    return found


def _of_file(path: Path, name: str, opened: deque[JsonLines]) -> Source:
    if path.suffix == ".parquet":
        return ParquetRows(name)
    if path.suffix == ".json" and _begins_a_list(path):
        return JsonList(name)
    return JsonLines(name, opened)


def _begins_a_list(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError as error:
        raise _unreadable(str(path), error) from None


def _is_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def _unreadable(name: str, error: OSError) -> SourceError:
    return SourceError(f"the input {name} cannot be read: {error.strerror or one_line(error)}", _GIVE)


def as_object(record: Any, name: str, unit: str, number: int) -> dict[str, Any]:
    """The record as the JSON object that it must be. Raises SourceError."""
    if not isinstance(record, dict):
        raise SourceError(f"{name}, {unit} {number} is a JSON {type(record).__name__}, not an object", _remedy(unit))
    return record


def _remedy(unit: str) -> str:
    return f"mend or remove that {unit}; each {unit} is one JSON object"


class JsonLines:
    """A file with one JSON object a line. opened: those of its kind that are open, the one that is closed next first."""

    unit = "line"

    def __init__(self, name: str, opened: deque[JsonLines]) -> None:
        self.name = name
        self._opened = opened
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()

    def scan(self) -> Iterator[tuple[Place, bytes]]:
        self._digest, offset = hashlib.sha256(), 0
        try:
            with Path(self.name).open("rb") as file:
                for number, line in enumerate(file, 1):
                    self._digest.update(line)
                    content = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                    if content:
                        yield Place(offset, number), content
                    offset += len(line)
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def record(self, place: Place) -> dict[str, Any]:
        try:
            file = self._file or self._reopened()
            file.seek(place.at)
            line = file.readline()
        except OSError as error:
            raise _unreadable(self.name, error) from None
        return self.parse(place, line)

    def _reopened(self) -> IO[bytes]:
        if len(self._opened) >= _OPEN:
            self._opened.popleft()._close()
        self._file = Path(self.name).open("rb")  # noqa: SIM115 - for the records to come
        self._opened.append(self)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def parse(self, place: Place, content: bytes) -> dict[str, Any]:
        where = f"{self.name}, line {place.number}"
        return as_object(_parsed(content, where, _remedy("line")), self.name, self.unit, place.number)

    def sha256(self) -> str:
        return self._digest.hexdigest()


def _parsed(text: bytes, where: str, remedy: str) -> Any:
    try:
        # Some editors put a byte-order mark before the first line.
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is not UTF-8 (byte {error.start} of the line)", remedy) from None
    except json.JSONDecodeError as error:
        raise SourceError(f"{where} is not JSON: {error.msg} at column {error.colno}", remedy) from None
    except (ValueError, RecursionError):  # A number of thousands of digits; brackets in brackets.
        raise SourceError(
            f"{where} is not JSON that can be read: a number too long or nested too deeply", remedy
        ) from None


class _Rows:
    """Records that are at hand by their index. of_table: a key that one record has every record has, empty or not."""

    unit = "row"
    of_table = True

    def __init__(self, name: str) -> None:
        self.name = name
        self._digest = hashlib.sha256()
        self._rows: Any = None

    def _open(self) -> Any:
        """A sequence of rows. Raises SourceError."""
        raise AssertionError("each kind of rows opens its own")

    def scan(self) -> Iterator[tuple[Place, bytes]]:
        self._digest = hashlib.sha256()
        if self._rows is None:
            self._rows = self._open()
        for index, row in enumerate(self._rows):
            content = json.dumps(row, sort_keys=True, default=str).encode()
            self._digest.update(content + b"\n")
            yield Place(index, index + 1), content

    def record(self, place: Place) -> dict[str, Any]:
        if self._rows is None:
            self._rows = self._open()
        return self._object(self._rows[place.at], place)

    def parse(self, place: Place, content: bytes) -> dict[str, Any]:
        return self._object(json.loads(content), place)

    def _object(self, row: Any, place: Place) -> dict[str, Any]:
        record = as_object(row, self.name, self.unit, place.number)
        return _without_empty(record) if self.of_table else record

    def sha256(self) -> str:
        return self._digest.hexdigest()


def _without_empty(value: Any) -> Any:
    """A value of a table without the keys that are there for other rows alone, however deep."""
    if isinstance(value, dict):
        return {key: _without_empty(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and any(isinstance(inner, (dict, list)) for inner in value):
        return [_without_empty(inner) for inner in value]
    return value


class JsonList(_Rows):
    """A file that is one JSON list of objects; it is held in memory."""

    unit = "element"
    of_table = False

    def _open(self) -> list[Any]:
        try:
            text = Path(self.name).read_bytes()
        except OSError as error:
            raise _unreadable(self.name, error) from None
        # It begins with a bracket, so what is parsed is a list.
        rows: list[Any] = _parsed(text, self.name, "mend it, or write one JSON object a line")
        return rows


class ParquetRows(_Rows):
    """A Parquet file, read through the memory-mapped copy that `datasets` makes of it in its own cache."""

    def _open(self) -> Any:
        import datasets

        datasets.disable_progress_bars()
        if not Path(self.name).is_file():
            raise SourceError(f"the input {self.name} is not a file", _GIVE)
        try:
            return datasets.Dataset.from_parquet(self.name)
        except Exception as error:  # datasets and pyarrow raise many kinds for a damaged file.
            cause = error.__cause__ or error
            raise SourceError(f"the input {self.name} cannot be read as Parquet: {one_line(cause)}", _GIVE) from error


class DatasetRows(_Rows):
    """A folder written by `save_to_disk`."""

    def _open(self) -> Any:
        import datasets

        if (Path(self.name) / "dataset_dict.json").is_file():
            splits = sorted(path.name for path in Path(self.name).iterdir() if path.is_dir())
            raise SourceError(
                f"the dataset {self.name} holds several splits", f"give one of its folders: {', '.join(splits)}"
            )
        try:
            return datasets.load_from_disk(self.name).with_format(None)  # a prepared dataset has torch's format
        except Exception as error:  # datasets and pyarrow raise many kinds for a damaged folder.
            raise SourceError(f"the dataset {self.name} cannot be opened: {one_line(error)}", _GIVE) from error
