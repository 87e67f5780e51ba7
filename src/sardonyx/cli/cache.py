"""`sardonyx cache`: list and clean the disk cache."""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from datetime import timedelta

import click
from rich.filesize import decimal
from rich.table import Table

from sardonyx.cache.disk import DiskCache, Entry, cache_folder
from sardonyx.cli._messages import example, print_result, table
from sardonyx.cli._parameters import as_json
from sardonyx.options import Options

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_HOURS_SHOWN = timedelta(hours=48)

pass_cache = click.make_pass_decorator(DiskCache)


def size_of(text: str) -> int:
    """Parse a size such as 500MB, 2GB, 1.5 GiB or 0 to bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise click.BadParameter(f"{text!r} is not a size; use 500MB, 2GB, 1.5GiB or 0")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@click.group(epilog=example("sardonyx cache ls", "sardonyx cache prune --limit 2GB"))
@click.option("--dir", "folder", help="The cache folder; default: SARDONYX_CACHE_DIR, or in the user's cache folder.")
@click.pass_context
def command(ctx: click.Context, folder: str | None) -> None:
    """List and clean the disk cache of compiled models."""
    options = Options.of({"cache_dir": folder} if folder else {})
    cache = DiskCache(cache_folder(options.cache_dir), options.cache_bytes)
    cache.check()
    ctx.obj = cache


@command.command(epilog=example("sardonyx cache ls"))
@as_json
@pass_cache
def ls(cache: DiskCache, as_json: bool) -> None:
    """List the entries, most recently used first."""
    entries = cache.entries()
    print_result([asdict(x) for x in entries], as_json, _table(entries) if entries else f"{cache.root} is empty")


@command.command(epilog=example("sardonyx cache size"))
@as_json
@pass_cache
def size(cache: DiskCache, as_json: bool) -> None:
    """Print the size, folder and limit of the cache."""
    entries = cache.entries()
    total = sum(entry.bytes for entry in entries)
    result = {"folder": str(cache.root), "entries": len(entries), "bytes": total, "limit": cache.limit}
    text = f"{decimal(total)} of {decimal(cache.limit)} in {_count(len(entries))}, in {cache.root}"
    print_result(result, as_json, text)


@command.command(epilog=example("sardonyx cache prune --limit 2GB"))
@click.option(
    "--limit", type=size_of, metavar="SIZE", help="Size to shrink to, as 2GB; default: the limit of the cache."
)
@as_json
@pass_cache
def prune(cache: DiskCache, limit: int | None, as_json: bool) -> None:
    """Evict least recently used entries until the cache is within a limit.

    Entries used in the last minute stay: a process may be reading them.
    """
    _print_freed(cache, cache.prune(cache.limit if limit is None else limit), as_json)


@command.command(epilog=example("sardonyx cache clear --yes"))
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@as_json
@pass_cache
def clear(cache: DiskCache, yes: bool, as_json: bool) -> None:
    """Delete all entries that are not being written."""
    entries = cache.entries()
    if not yes and entries:
        total = decimal(sum(entry.bytes for entry in entries))
        click.confirm(f"Delete {_count(len(entries))} of {total} from {cache.root}?", abort=True, err=True)
    _print_freed(cache, cache.clear(), as_json)


def _print_freed(cache: DiskCache, freed: int, as_json: bool) -> None:
    left = cache.size()
    print_result({"freed": freed, "bytes": left}, as_json, f"{decimal(freed)} freed, {decimal(left)} left")


def _table(entries: list[Entry]) -> Table:
    rows = [(x.key[:12], " ".join(x.about.values()), decimal(x.bytes), _ago(x.made), _ago(x.used)) for x in entries]
    return table(["key", "what", "size", "made", "used"], rows, right=["size"])


def _ago(then: float) -> str:
    passed = timedelta(seconds=max(0, round(time.time() - then)))
    return f"{passed} ago" if passed < _HOURS_SHOWN else f"{passed.days} days ago"


def _count(entries: int) -> str:
    return f"{entries} entr{'y' if entries == 1 else 'ies'}"
