"""Task specifications: the weighted domains and how a specification is drawn."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolr0_core.config import SpecConfig
from toolr0_core.schema import TaskSpec, is_text

_MAX_WEIGHT = 1e9  # so that sums stay finite


@dataclass(frozen=True)
class Domain:
    """A domain's share of the specifications (relative) and what it covers, for the full prompts."""

    weight: float
    description: str


DOMAINS: dict[str, Domain] = {name: Domain(1 / 32, text) for name, text in {
    "finance": "accounts, payments, budgets and markets", "healthcare": "appointments, prescriptions and records",
    "productivity": "notes, tasks and documents", "retail_ecommerce": "products, carts, orders and returns",
    "scheduling": "calendars, meetings and reminders", "database": "queries, tables and records",
    "cloud_infrastructure": "servers, storage and deployments", "system": "files, processes and settings",
    "programming": "code, builds and repositories", "geolocation": "places, routes and distances",
    "logistics": "shipments, warehouses and deliveries", "communication": "messages, calls and contacts",
    "iot": "devices, sensors and home automation", "cybersecurity": "scans, alerts and access",
    "insurance": "policies, claims and quotes", "legal": "contracts, cases and filings",
    "news": "articles, sources and headlines", "weather": "forecasts, alerts and climate",
    "sports": "matches, teams and scores", "entertainment": "films, music and events",
    "education": "courses, exams and students", "real_estate": "listings, viewings and leases",
    "food_ordering": "restaurants, menus and deliveries", "translation": "languages and texts",
    "utilities": "units, timers and calculators", "government": "permits, taxes and public records",
    "memory_management": "storing and recalling facts about a user", "web_search": "searching and reading pages",
    "social_media": "posts, followers and feeds", "math": "calculations and statistics",
    "vehicle_control": "cars, charging and climate", "travel": "flights, hotels and visas"}.items()}


def load_domains(path: str | Path) -> dict[str, Domain]:
    """The built-in domains for an empty path, else those of a JSON file {name: {"weight": w, "description": text}}.

    Raises ValueError, in one sentence, for a file that is absent or not of that form.
    """
    if not path:
        return DOMAINS
    form = 'a JSON object {name: {"weight": number above 0, "description": text}}'
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"specs.domains {path}: {error}; it has to be {form}") from None
    if not isinstance(table, dict) or not table:
        raise ValueError(f"specs.domains {path}: holds no domains; it has to be {form}")
    for name, entry in table.items():
        weight = entry.get("weight", 1) if isinstance(entry, dict) else None
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _MAX_WEIGHT:
            raise ValueError(f"specs.domains {path}: domain {name!r:.80} is {entry!r:.80}; the file has to be {form}")
        if not is_text(name) or not is_text(entry.get("description", "")):
            raise ValueError(f"specs.domains {path}: domain {name!r:.80} has a name or description that is no text or "
                             f"holds half of a surrogate pair; write its whole characters")
    return {name: Domain(float(entry.get("weight", 1)), entry.get("description", "")) for name, entry in table.items()}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def sample_spec(rng: random.Random, config: SpecConfig | None = None, domains: dict[str, Domain] | None = None) -> TaskSpec:
    """One specification: context, then the number of calls, then the menu's size, then the domain."""
    config = config or SpecConfig()
    domains = domains or load_domains(config.domains)
    multi = rng.random() < config.multi_turn
    n_calls = 2 if not multi and rng.random() < config.two_calls else 1
    sizes = config.two_call_menu if n_calls == 2 else config.one_call_menu
    n_tools = int(rng.choices(list(sizes), list(sizes.values()))[0])
    domain = rng.choices(list(domains), [d.weight for d in domains.values()])[0]
    return TaskSpec(domain, "multi_turn" if multi else "single_turn", n_tools, n_calls)


def shape_shares(config: SpecConfig) -> dict[tuple[int, int], float]:
    """(calls, tools) -> share of the specifications that ask for that shape; what selection balances towards."""
    two = (1 - config.multi_turn) * config.two_calls
    shares = {}
    for calls, share, sizes in ((1, 1 - two, config.one_call_menu), (2, two, config.two_call_menu)):
        total = sum(sizes.values())
        shares |= {(calls, int(size)): share * weight / total for size, weight in sizes.items()}
    return {shape: share for shape, share in shares.items() if share > 0}
