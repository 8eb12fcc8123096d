"""Programs changed in one place, as a defect of a compiler would change them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

CONVERSION = re.compile(
    r"^(?P<indent>\s+)(?P<target>\w+) = C\.(?P<how>convert|start)"
    r"\((?P<source>[\w.]+), (?P<axis>\w+), \"(?P<text>[^\"]+)\"\)"
)
LINE = re.compile(r"^(?P<indent> {8,})(?P<target>\w+) = (?P<code>(?!self\.mesh)[^#]+?)(?P<rest>\s*(#.*)?)$")
KINDS = ("R", "I", "P", "S(0)", "S(1)", "S(2)")
SAME_SHAPE = ("F.silu", "F.gelu", "F.relu")

Lines = list[str]
Mutation = Callable[[Lines, Random], bool]
"""Changes the lines in place, and says whether it found a place."""


def _choose(lines: Lines, pattern: re.Pattern[str], random: Random) -> tuple[int, re.Match[str]] | None:
    places = [(index, found) for index, line in enumerate(lines) if (found := pattern.match(line))]
    return random.choice(places) if places else None


def collective_left_out(lines: Lines, random: Random) -> bool:
    found = _choose(lines, CONVERSION, random)
    if found is None:
        return False
    index, match = found
    lines[index] = f"{match['indent']}{match['target']} = {match['source']}"
    return True


def collective_doubled(lines: Lines, random: Random) -> bool:
    found = _choose(lines, CONVERSION, random)
    if found is None or found[1]["how"] == "start":
        return False
    index, match = found
    first = f'{match["indent"]}{match["target"]}_once = C.convert({match["source"]}, {match["axis"]}, "{match["text"]}")'
    again = f'{match["indent"]}{match["target"]} = C.convert({match["target"]}_once, {match["axis"]}, "{match["text"]}")'
    lines[index : index + 1] = [first, again]
    return True


def other_placement(lines: Lines, random: Random) -> bool:
    found = _choose(lines, CONVERSION, random)
    if found is None:
        return False
    index, match = found
    source, target = match["text"].split(" -> ")
    changed = [source, target]
    changed[random.randrange(2)] = random.choice(KINDS)
    lines[index] = lines[index].replace(f'"{match["text"]}"', f'"{" -> ".join(changed)}"')
    return " -> ".join(changed) != match["text"]


def other_axis(lines: Lines, random: Random) -> bool:
    found = _choose(lines, CONVERSION, random)
    if found is None:
        return False
    index, match = found
    axis = random.choice(("dp", "tp", "tp2"))
    lines[index] = lines[index].replace(f", {match['axis']}, ", f", self.mesh.{axis}, ", 1)
    return axis != match["axis"] and any(f'"{axis}":' in line for line in lines if "mesh_axes" in line)


def scaled(lines: Lines, random: Random) -> bool:
    found = _choose(lines, LINE, random)
    if found is None or "C.start" in found[1]["code"] or found[1]["code"].rstrip().endswith("("):
        return False
    index, match = found
    lines[index] = f"{match['indent']}{match['target']}_raw = {match['code']}"
    lines.insert(
        index + 1, f"{match['indent']}{match['target']} = {match['target']}_raw * {random.choice(('2.0', '0.5', '1.0'))}"
    )
    return True


def cut_off(lines: Lines, random: Random) -> bool:
    """A gradient that is lost."""
    found = _choose(lines, LINE, random)
    if found is None or "C.start" in found[1]["code"] or found[1]["code"].rstrip().endswith("("):
        return False
    index, match = found
    lines[index] = f"{match['indent']}{match['target']}_raw = {match['code']}"
    lines.insert(index + 1, f"{match['indent']}{match['target']} = {match['target']}_raw.detach()")
    return True


def other_operand(lines: Lines, random: Random) -> bool:
    found = _choose(lines, LINE, random)
    if found is None:
        return False
    index, match = found
    before = [m["target"] for line in lines[max(0, index - 12) : index] if (m := LINE.match(line))]
    used = [name for name in re.findall(r"\b[a-z]\w*\b", match["code"]) if name in before]
    if len(before) < 2 or not used:
        return False
    old, new = random.choice(used), random.choice(before)
    lines[index] = lines[index].replace(match["code"], re.sub(rf"\b{old}\b", new, match["code"], count=1), 1)
    return old != new


def other_number(lines: Lines, random: Random) -> bool:
    found = _choose(lines, LINE, random)
    if found is None:
        return False
    index, match = found
    numbers = list(re.finditer(r"(?<![\w.])\d+(\.\d+)?(e-?\d+)?\b", match["code"]))
    if not numbers:
        return False
    number = random.choice(numbers)
    new = str(float(number[0]) * 2) if number[1] or number[2] else str(max(0, int(number[0]) + random.choice((-1, 1, 2))))
    code = match["code"][: number.start()] + new + match["code"][number.end() :]
    lines[index] = lines[index].replace(match["code"], code, 1)
    return new != number[0]


def other_shard_of_a_parameter(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r"^\s+ParameterSpec\("), random)
    if found is None:
        return False
    index, old = found[0], lines[found[0]]
    if re.search(r"S\(\d", old):
        lines[index] = re.sub(r"S\(\d(,\d+)?\)", random.choice(("S(0)", "S(1)", "R", "I")), old, count=1)
    else:
        lines[index] = old.replace("{}", f'{{"tp": "{random.choice(("S(0)", "R"))}"}}')
    return lines[index] != old


def wait_missing(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r".*C\.wait\((\w+)\)"), random)
    if found is None:
        return False
    lines[found[0]] = re.sub(r"C\.wait\((\w+)\)", r"\1", lines[found[0]])
    return True


def other_batch(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r'^        "\w+": \{"\w+": "S\(0\)"\},'), random)
    if found is None:
        return False
    lines[found[0]] = lines[found[0]].replace('"S(0)"', random.choice(('"R"', '"S(1)"')))
    return True


def other_layers(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r".*for i in range\((\d+)\)"), random)
    if found is None:
        return False
    count = int(found[1][1])
    lines[found[0]] = lines[found[0]].replace(f"range({count})", random.choice((f"range({count - 1})", f"range(1, {count})")))
    return True


def other_results(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r"^(?P<indent>\s+)return (?P<a>\w+), (?P<b>\w+)(?P<rest>.*)$"), random)
    if found is None:
        return False
    index, match = found
    lines[index] = f"{match['indent']}return {match['b']}, {match['a']}{match['rest']}"
    return True


def other_operation(lines: Lines, random: Random) -> bool:
    found = _choose(lines, re.compile(r".*(F\.silu|F\.gelu|F\.relu| \+ | - | \* )"), random)
    if found is None:
        return False
    old = found[1][1]
    new = random.choice([each for each in (SAME_SHAPE if old.startswith("F") else (" + ", " - ", " * ")) if each != old])
    lines[found[0]] = lines[found[0]].replace(old, new, 1)
    return True


def other_mode(lines: Lines, random: Random) -> bool:
    """Micro-batches, totals, stored kinds of parameters."""
    found = _choose(lines, re.compile(r".*(micro_batches = \d+|trainable=False|\"sum\"|zero = \d|, -100)"), random)
    if found is None:
        return False
    change = {"trainable=False": "trainable=True", '"sum"': '"max"', ", -100": ", -1"}
    old = found[1][1]
    lines[found[0]] = lines[found[0]].replace(old, change.get(old, "micro_batches = 4" if "micro" in old else old), 1)
    return change.get(old) is not None or "micro" in old


MUTATIONS: tuple[Mutation, ...] = (
    collective_left_out, collective_doubled, other_placement, other_axis, scaled, cut_off, other_operand, other_number,
    other_shard_of_a_parameter, wait_missing, other_batch, other_layers, other_results, other_operation, other_mode,
)  # fmt: skip


def mutants(text: str, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """The kind of change, and the changed text; each differs from `text` and from the others."""
    random, seen, tries = Random(seed), {text}, 0
    while len(seen) <= count and tries < 20 * count:
        tries += 1
        mutation = random.choice(MUTATIONS)
        lines = text.splitlines()
        changed = mutation(lines, random)
        new = "\n".join(lines) + "\n"
        if changed and new not in seen:
            seen.add(new)
            yield mutation.__name__, new
