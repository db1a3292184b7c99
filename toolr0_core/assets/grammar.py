"""The template grammar that the embedded model `nano` is pretrained on, and that its held-out tasks come from.

Only launch/pretrain_nano.py and tests import this: the self-play loop never sees a truth that the grammar knows.

A tool is VERB_OBJECT with a fixed set of parameters; a question says each argument with a cue of its own. Thirty-two
tools and every eighth triple of tool, parameter and value never occur in pretraining (`UNSEEN_TOOLS`, `is_unseen_pair`).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from toolr0_core.schema import Task, TaskSpec, Tool, ToolCall

VERBS = {  # name in tools -> how a question says it
    "book": ("book", "reserve"), "cancel": ("cancel", "drop"), "find": ("find", "search"), "create": ("create", "make"),
    "update": ("update", "change"), "delete": ("delete", "remove"), "send": ("send", "forward"),
    "start": ("start", "launch"), "stop": ("stop", "end"), "track": ("track", "follow"), "order": ("order", "buy"),
    "check": ("check", "show"),
}
DOMAINS = {  # domain -> its objects and the parameters its tools draw from
    "travel": ("hotel flight tour visa", "city day nights people price origin"),
    "food_ordering": ("table pizza meal menu", "city day people dish price hour"),
    "scheduling": ("meeting reminder shift calendar", "day hour person minutes topic room"),
    "entertainment": ("movie concert song playlist", "title artist genre count day city"),
    "healthcare": ("checkup prescription therapy vaccine", "person day hour city minutes code"),
    "finance": ("loan transfer budget stock", "amount currency person code count day"),
    "weather": ("forecast storm alert radar", "city day hour degrees language level"),
    "sports": ("match training ticket league", "team city day people price hour"),
    "education": ("lesson exam course quiz", "topic level language day count minutes"),
    "real_estate": ("apartment office viewing lease", "city rooms price day hour person"),
    "communication": ("letter newsletter message contact", "person topic language day title count"),
    "iot": ("lamp heater camera lock", "room degrees level minutes color hour"),
    "logistics": ("parcel shipment pickup truck", "origin city code day weight person"),
    "retail_ecommerce": ("shirt phone coupon basket", "color size price count code person"),
    "news": ("article podcast headline column", "topic language day count title city"),
    "vehicle_control": ("engine charger window seat", "level degrees minutes code city person"),
}
CITIES = ("Berlin Paris London Madrid Rome Vienna Oslo Dublin Lisbon Prague Athens Cairo Delhi Tokyo Seoul Lima "
          "Quito Boston Denver Dallas Miami Toronto Sydney Nairobi").split()
NAMES = ("Anna Ben Carla David Emma Felix Greta Hugo Ines Jonas Kira Leo Maria Nina Omar Paula Rosa Sam Tara Uma Victor "
         "Wendy Yusuf Zoe").split()
TOPICS = ("history music biology algebra physics poetry football chess economy climate fashion health energy robots "
          "space oceans animals painting cooking gardens").split()
NUMBERS = list(range(2, 61))
PARAMETERS = {  # name -> (JSON type, values, cues)
    "city": ("string", CITIES, ("in {}", "near {}")),
    "day": ("string", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(), ("on {}", "this {}")),
    "nights": ("integer", NUMBERS, ("for {} nights",)),
    "people": ("integer", NUMBERS, ("for {} people", "for {} guests")),
    "price": ("integer", NUMBERS, ("under {} euros", "below {} euros")),
    "origin": ("string", CITIES, ("from {}", "out of {}")),
    "dish": ("string", "pasta rice soup salad curry sushi tacos steak fish beans noodles tofu".split(), ("with {}",)),
    "hour": ("integer", NUMBERS[:22], ("at {} hours", "by {} hours")),
    "person": ("string", NAMES, ("for {}", "to {}")),
    "minutes": ("integer", NUMBERS, ("lasting {} minutes", "for {} minutes")),
    "topic": ("string", TOPICS, ("about {}", "on {}")),
    "room": ("string", "kitchen bedroom garage hallway cellar attic garden bathroom".split(), ("in the {}",)),
    "title": ("string", "Aurora Blossom Comet Delta Echo Falcon Galaxy Horizon Indigo Jupiter Kepler Lotus".split(),
              ("called {}", "titled {}")),
    "artist": ("string", NAMES, ("by {}",)),
    "genre": ("string", "jazz rock techno folk blues opera salsa punk".split(), ("in {} style",)),
    "count": ("integer", NUMBERS, ("with {} items", "limited to {}")),
    "amount": ("integer", NUMBERS, ("over {} dollars", "of {} dollars")),
    "currency": ("string", "euro dollar yen peso pound franc".split(), ("paid in {}",)),
    "degrees": ("integer", NUMBERS, ("at {} degrees",)),
    "team": ("string", "Lions Tigers Bears Eagles Sharks Wolves Hawks Bulls Foxes Ravens Cobras Otters".split(),
             ("against {}", "versus {}")),
    "level": ("integer", NUMBERS[:10], ("at level {}",)),
    "language": ("string", "English French German Spanish Polish Greek Turkish Arabic Hindi Korean".split(),
                 ("in {}",)),
    "rooms": ("integer", NUMBERS[:10], ("with {} rooms",)),
    "color": ("string", "red blue green black white yellow purple orange pink gray".split(), ("in {}", "colored {}")),
    "size": ("string", "small medium large huge".split(), ("in size {}",)),
    "weight": ("integer", NUMBERS, ("of {} kilos",)),
    "code": ("string", [f"{letter}{digit}" for letter in "ABCDEF" for digit in range(1, 10)],
             ("with code {}", "number {}")),
}
FRAMES = ("{}.", "Please {}.", "Can you {}?", "I need to {}.", "I want to {}.")


def _hash(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest(), "big")


def _tools() -> dict[str, dict[str, tuple[str, ...]]]:
    """Domain -> tool name -> parameter names: three verbs for each object, one to three parameters each."""
    rng = random.Random(20260221)
    menu = {}
    for domain, (objects, parameters) in DOMAINS.items():
        menu[domain] = {}
        for obj in objects.split():
            for verb in rng.sample(sorted(VERBS), 3):
                chosen = rng.sample(parameters.split(), rng.choices((1, 2, 3), (0.35, 0.45, 0.2))[0])
                menu[domain][f"{verb}_{obj}"] = tuple(p for p in parameters.split() if p in chosen)
    return menu


TOOLS = _tools()
UNSEEN_TOOLS = frozenset(sorted((name for tools in TOOLS.values() for name in tools), key=_hash)[:32])


def is_unseen_pair(tool: str, parameter: str, value: object) -> bool:
    """One (tool, parameter, value) in eight never occurs in a pretraining document."""
    return _hash(tool, parameter, value) % 8 == 0


def make_tool(name: str, parameters: tuple[str, ...]) -> Tool:
    return Tool(name, "", {p: {"type": PARAMETERS[p][0]} for p in parameters}, parameters)


@dataclass(frozen=True)
class Draw:
    """How tasks are drawn: pretraining avoids what is unseen, held-out tasks need it ("tool" or "pair")."""

    unseen: str | None = None
    random_parameters: float = 0.0  # share of menu tools with a random parameter set, so that menus must be read
    random_tools: float = 0.0  # share of tasks over all pairs of verb and object, so that names must be read
    closeness: float = 0.7  # share of distractors that share the verb or the object of a gold tool
    two_calls: float = 0.2  # share of tasks of two calls
    plain: bool = False  # small menus of one call, for the first steps of pretraining


ANY = Draw()


def sample_task_spec(rng: random.Random, draw: Draw = ANY) -> TaskSpec:
    """The distribution of the preset's specs: menus of 2..4 tools, 3..4 where two are called."""
    domain = rng.choice(sorted(TOOLS))
    if draw.plain:
        return TaskSpec(domain, "single_turn", 2, 1)
    if rng.random() < draw.two_calls:
        return TaskSpec(domain, "single_turn", rng.choice((3, 4)), 2)
    return TaskSpec(domain, "single_turn", rng.choice((2, 3, 4)), 1)


def sample_task(rng: random.Random, draw: Draw = ANY, spec: TaskSpec | None = None) -> Task:
    """A task whose gold calls are right by construction."""
    spec = spec or sample_task_spec(rng, draw)
    while True:
        names = _names(rng, spec, draw)
        gold_names = _gold_names(rng, spec, names, draw)
        tools = _menu(rng, spec, names, gold_names, draw)
        calls = tuple(_call(rng, next(t for t in tools if t.name == name), draw) for name in gold_names)
        if draw.unseen != "pair" or any(is_unseen_pair(c.name, p, v) for c in calls for p, v in c.arguments.items()):
            return Task(question(rng, calls), tools, calls, spec)


def _names(rng: random.Random, spec: TaskSpec, draw: Draw) -> list[str]:
    """The tools that a task draws from: the domain's, or any pair of verb and object of it."""
    if rng.random() < draw.random_tools:
        return [f"{verb}_{obj}" for verb in sorted(VERBS) for obj in DOMAINS[spec.domain][0].split()]
    return sorted(TOOLS[spec.domain])


def _gold_names(rng: random.Random, spec: TaskSpec, names: list[str], draw: Draw) -> list[str]:
    seen = [n for n in names if n not in UNSEEN_TOOLS]
    unseen = [n for n in names if n in UNSEEN_TOOLS]
    if draw.unseen == "tool" and unseen:
        rest = rng.sample([n for n in names], spec.n_calls)
        first = rng.choice(unseen)
        gold = [first] + [n for n in rest if n != first][: spec.n_calls - 1]
        rng.shuffle(gold)
        return gold
    return rng.sample(seen, spec.n_calls)


def _menu(rng: random.Random, spec: TaskSpec, names: list[str], gold: list[str], draw: Draw) -> tuple[Tool, ...]:
    pool = [n for n in names if n not in gold and (draw.unseen or n not in UNSEEN_TOOLS)]
    parts = {part for name in gold for part in name.split("_")}
    close = [n for n in pool if parts & set(n.split("_"))]
    menu = list(gold)
    while len(menu) < spec.n_tools:
        source = close if rng.random() < draw.closeness and any(n not in menu for n in close) else pool
        menu.append(rng.choice([n for n in source if n not in menu]))
    rng.shuffle(menu)
    return tuple(make_tool(n, _parameters(rng, spec.domain, n, draw)) for n in menu)


def _parameters(rng: random.Random, domain: str, name: str, draw: Draw) -> tuple[str, ...]:
    if name in TOOLS[domain] and rng.random() >= draw.random_parameters:
        return TOOLS[domain][name]
    parameters = DOMAINS[domain][1].split()
    chosen = rng.sample(parameters, rng.choice((1, 2, 3)))
    return tuple(p for p in parameters if p in chosen)


def _call(rng: random.Random, tool: Tool, draw: Draw) -> ToolCall:
    arguments = {}
    for parameter in tool.parameters:
        values = PARAMETERS[parameter][1]
        allowed = [v for v in values if draw.unseen or not is_unseen_pair(tool.name, parameter, v)]
        arguments[parameter] = rng.choice(allowed or values)
    return ToolCall(tool.name, arguments)


def question(rng: random.Random, calls: tuple[ToolCall, ...]) -> str:
    """The request in words: a synonym of the verb, the object and one cue for each argument, in any order."""
    clauses = []
    for call in calls:
        verb, obj = call.name.split("_", 1)
        cues = [rng.choice(PARAMETERS[p][2]).format(v) for p, v in call.arguments.items()]
        rng.shuffle(cues)
        clauses.append(" ".join([rng.choice(VERBS[verb]), rng.choice(("a", "the", "my")), obj, *cues]))
    text = rng.choice(FRAMES).format(rng.choice((" and then ", " and ")).join(clauses))
    return text[0].upper() + text[1:]
