"""Variants: a kernel with constants at its top set otherwise, named like `v04:pad=0` or `v04:block_q=32,copies=scalar`.

A variant measures one decision alone. It is a copy of the kernel that differs in the lines of those constants, kept in
the cache, and from there on like a reader's own file: built on demand, checked, counted and timed as any version is.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import replace
from pathlib import Path

from flash_tutorial import build, files
from flash_tutorial.versions import Option, Version


def variant(version: Version, settings: str) -> Version:
    """The version with `settings` ("pad=0,copies=scalar") in its kernel's constants.

    A setting that the kernel has anyway is left out of the name, so that `v04:pad=4` is v04 itself. Raises ValueError
    for an option or a value that the version does not have, naming those that it has, and for a kernel of the
    reader's own that has no such constant any more.
    """
    if version.settings:
        raise ValueError(f"{version.name} is a variant already: further settings follow a comma")
    chosen: dict[str, str] = {}
    options = {option.name: option for option in version.options}
    text = original = version.source.read_text(encoding="utf-8")
    for setting in settings.split(","):
        name, _, word = (part.strip() for part in setting.partition("="))
        if name not in options:
            raise ValueError(f"{version.name} has no option {name!r} to vary: {_offered(version)}")
        option = options[name]
        if word not in option.words:
            raise ValueError(f"{version.name}:{name} is {word!r}: accepted are {', '.join(option.words)}")
        if name in chosen:
            raise ValueError(f"{version.name}:{settings} sets {name} twice")
        changed = _set(text, option, word, version.source)
        if changed != text:
            chosen[name] = word
        text = changed
    if text == original:
        return version
    words = [f"{option.name}={chosen[option.name]}" for option in version.options if option.name in chosen]
    label = ", ".join(words)
    meanings = "; ".join(option.meaning for option in version.options if option.name in chosen)
    return replace(
        version,
        name=f"{version.name}:{','.join(words)}",
        title=f"{version.title}, {label}",
        idea=f"{version.name.partition('_')[0]} with {label} ({meanings}).",
        parent=version.parent if version.own else version.name,
        own=_kept(version.source, words, text),
        settings=tuple(chosen.items()),
    )


def _offered(version: Version) -> str:
    if not version.options:
        return "it has none"
    return "it has " + "; ".join(f"{option.name}={'|'.join(option.words)}" for option in version.options)


def _set(text: str, option: Option, word: str, source: Path) -> str:
    """The kernel's text with the option's constant set, in a line such as `constexpr int PAD = 4;`, `using Index =
    int;` or `#define INLINE __forceinline__`."""
    name = re.escape(option.constant)
    pattern = rf"^((?:constexpr [^=;\n]*\b{name} = |using {name} = |#define {name} ))([^;\n/]*[^;\s/])"
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if len(found) != 1:
        raise ValueError(f"{source} defines the constant {option.constant} {len(found)} times: {option.name} sets it")
    start, end = found[0].span(2)
    return text[:start] + dict(option.values)[word] + text[end:]


def _kept(source: Path, words: list[str], text: str) -> Path:
    """A file with the variant's text, written anew only where it changed, so that it is not rebuilt for nothing."""
    place = build.cache_dir() / "variants" / f"{zlib.crc32(str(source.resolve()).encode()):08x}"
    path = place / f"{source.stem}__{'__'.join(word.replace('=', '_') for word in words)}.cu"
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            place.mkdir(parents=True, exist_ok=True)
            files.write(path, text)
    except OSError as error:
        raise OSError(
            f"{error}: {path.name} cannot be kept in {place}; $FLASH_TUTORIAL_CACHE may name another directory"
        ) from error
    return path
