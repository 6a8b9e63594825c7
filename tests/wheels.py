"""Checks built wheels: `python -m tests.wheels dist/*.whl`.

A wheel says in its name where it can be installed. This looks whether that is true, and whether
all is in it that a user or a package index expects. It reads the library's ELF headers itself, so a
wheel for another processor needs no tools of that processor.
"""

import re
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TAG: Final = "cp311-abi3-manylinux_2_28"
NEWEST_GLIBC: Final = (2, 28)
MAX_BYTES: Final = 1_500_000
# ELF's number of the machine, and the largest page of its kernels: a library whose segments are
# aligned to less can't be loaded there.
MACHINES: Final = {"x86_64": (62, 1 << 12), "aarch64": (183, 1 << 16)}
# What manylinux_2_28 allows and a Rust library without C needs.
LIBRARIES: Final = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
LIBRARY: Final = "sparksched/_core.abi3.so"
FILES: Final = (LIBRARY, "sparksched/_core.pyi", "sparksched/py.typed", "sparksched/cli.py")
METADATA_FILES: Final = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
URLS: Final = {"Homepage", "Documentation", "Changelog", "Issues"}
CLASSIFIERS: Final = {
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Rust",
    "Typing :: Typed",
}


@dataclass(frozen=True)
class Library:
    """What the dynamic linker is told of a 64-bit ELF file."""

    machine: int
    alignments: list[int]
    """Of the segments that are loaded, in bytes."""
    needed: set[str]
    versions: set[str]
    """Versions of symbols that other libraries must have, such as `GLIBC_2.28`."""
    exported: set[str]


PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB, DT_VERNEED, DT_VERNEEDNUM = 1, 5, 0x6FFFFFFE, 0x6FFFFFFF
SHT_DYNSYM = 11


def read_library(content: bytes) -> Library:
    """Read a little-endian 64-bit ELF file.

    Raises:
        ValueError: if it is none.

    """
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no little-endian 64-bit ELF file")
    (machine,) = struct.unpack_from("<H", content, 18)
    program_at, section_at = struct.unpack_from("<QQ", content, 32)
    program_size, num_programs, section_size, num_sections = struct.unpack_from(
        "<HHHH", content, 54
    )
    # Type, flags, offset, address, physical address, bytes in the file, in memory, alignment.
    programs = [
        struct.unpack_from("<IIQQQQQQ", content, program_at + index * program_size)
        for index in range(num_programs)
    ]
    loaded = [it for it in programs if it[0] == PT_LOAD]

    def offset_of(address: int) -> int:
        (delta,) = [it[2] - it[3] for it in loaded if it[3] <= address < it[3] + it[5]]
        return address + int(delta)

    (dynamic,) = [it for it in programs if it[0] == PT_DYNAMIC]
    entries = list(struct.iter_unpack("<QQ", content[dynamic[2] : dynamic[2] + dynamic[5]]))
    table = dict(entries)
    strings_at = offset_of(table[DT_STRTAB])

    def string(offset: int) -> str:
        start = strings_at + offset
        return content[start : content.index(b"\0", start)].decode()

    # Name, type, flags, address, offset, size, link, info, alignment, size of an entry.
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", content, section_at + index * section_size)
        for index in range(num_sections)
    ]
    (symbols,) = [it for it in sections if it[1] == SHT_DYNSYM]
    # Name, info, other, section, value, size: one without a section is another library's.
    exported = {
        string(name)
        for name, _, _, section, _, _ in struct.iter_unpack(
            "<IBBHQQ", content[symbols[4] : symbols[4] + symbols[5]]
        )
        if section != 0
    }
    return Library(
        machine=machine,
        alignments=[it[7] for it in loaded],
        needed={string(value) for tag, value in entries if tag == DT_NEEDED},
        versions={string(it) for it in names_of_versions(content, table, offset_of)},
        exported=exported,
    )


def names_of_versions(
    content: bytes, table: dict[int, int], offset_of: Callable[[int], int]
) -> Iterator[int]:
    """Return where in the table of strings the versions stand that other libraries must have."""
    at = offset_of(table[DT_VERNEED])
    for _ in range(table[DT_VERNEEDNUM]):
        # Version, number of versions, file, where they begin, where the next library begins.
        _, count, _, first, following = struct.unpack_from("<HHIII", content, at)
        version_at = at + first
        for _ in range(count):
            # Hash, flags, index, name, where the next one begins.
            _, _, _, name, next_version = struct.unpack_from("<IHHII", content, version_at)
            yield name
            version_at += next_version
        at += following


def problems_of_library(library: Library, processor: str) -> Iterator[str]:
    """Say what keeps a library from being loaded where its wheel can be installed."""
    machine, page = MACHINES[processor]
    if library.machine != machine:
        yield f"the library is for machine {library.machine}, not for {processor}"
    if min(library.alignments) < page:
        yield f"segments are aligned to {min(library.alignments)} bytes, pages have up to {page}"
    if unexpected := library.needed - LIBRARIES:
        yield f"it needs {', '.join(sorted(unexpected))}"
    if newest_glibc(library) > NEWEST_GLIBC:
        yield f"it needs glibc {'.'.join(map(str, newest_glibc(library)))}"
    if library.exported != {"PyInit__core"}:
        yield f"it exports {', '.join(sorted(library.exported))}"


def newest_glibc(library: Library) -> tuple[int, ...]:
    numbers = [it.removeprefix("GLIBC_").split(".") for it in library.versions if "GLIBC_" in it]
    return max(tuple(map(int, it)) for it in numbers)


def problems_of_metadata(metadata: Message, version: str) -> Iterator[str]:
    """Say what a package index or a user would miss."""
    expected = {"Name": "sparksched", "Version": version, "License-Expression": "Apache-2.0"}
    for name, value in expected.items():
        if metadata[name] != value:
            yield f"{name} is {metadata[name]}, not {value}"
    for name in ("Summary", "Requires-Python", "Keywords", "Description-Content-Type"):
        if not metadata[name]:
            yield f"no {name}"
    urls = {it.split(",")[0] for it in metadata.get_all("Project-URL", [])}
    if missing := URLS - urls:
        yield f"no URL of {', '.join(sorted(missing))}"
    if missing := CLASSIFIERS - set(metadata.get_all("Classifier", [])):
        yield f"no classifier {', '.join(sorted(missing))}"
    if "# sparksched" not in metadata.get_payload():
        yield "the description is not README.md"


def problems_of(path: Path) -> Iterator[str]:
    """Say all that is wrong with a wheel."""
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    name = re.fullmatch(rf"sparksched-{re.escape(version)}-{TAG}_(\w+)\.whl", path.name)
    if not name or name[1] not in MACHINES:
        yield f"it is not called sparksched-{version}-{TAG}_PROCESSOR.whl"
        return
    if path.stat().st_size > MAX_BYTES:
        yield f"it has {path.stat().st_size} bytes, more than {MAX_BYTES}"
    folder = f"sparksched-{version}.dist-info"
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        if missing := {*FILES, *(f"{folder}/{it}" for it in METADATA_FILES)} - files:
            yield f"it lacks {', '.join(sorted(missing))}"
            return
        if not any(it.startswith(f"{folder}/sboms/") for it in files):
            yield "it has no list of the crates in it (SBOM)"
        if strange := {it for it in files if not it.startswith(("sparksched/", f"{folder}/"))}:
            yield f"it has files outside its folders: {', '.join(sorted(strange))}"
        if f"Tag: {TAG}_{name[1]}\n" not in wheel.read(f"{folder}/WHEEL").decode():
            yield "its file WHEEL has another tag than its name"
        metadata = message_from_string(wheel.read(f"{folder}/METADATA").decode())
        yield from problems_of_metadata(metadata, version)
        content = wheel.read(LIBRARY)
    try:
        library = read_library(content)
    except ValueError as error:
        yield f"{LIBRARY} is {error}"
        return
    yield from problems_of_library(library, name[1])
    print(
        f"{path.name}: {path.stat().st_size:,} bytes, {len(files)} files,"
        f" glibc {'.'.join(map(str, newest_glibc(library)))},"
        f" segments aligned to {min(library.alignments):,}"
    )


def main(paths: list[str]) -> int:
    """Return the command's exit status: 1 if a wheel is not as it should be."""
    problems = [f"{path}: {it}" for path in paths for it in problems_of(Path(path))]
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems or not paths else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
