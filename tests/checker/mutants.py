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

Change = Callable[[Lines, Random, int, re.Match[str]], bool]
"""A mutation of the line of this number, which matched."""

MUTATIONS: list[Mutation] = []


def mutation_of(pattern: re.Pattern[str] | str) -> Callable[[Change], Mutation]:
    """A mutation of one of the lines that match, drawn at random."""

    def register(change: Change) -> Mutation:
        def mutation(lines: Lines, random: Random) -> bool:
            places = [(index, found) for index, line in enumerate(lines) if (found := re.match(pattern, line))]
            return bool(places) and change(lines, random, *random.choice(places))

        mutation.__name__ = change.__name__
        MUTATIONS.append(mutation)
        return mutation

    return register


@mutation_of(CONVERSION)
def collective_left_out(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    lines[index] = f"{match['indent']}{match['target']} = {match['source']}"
    return True


@mutation_of(CONVERSION)
def collective_doubled(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    if match["how"] == "start":
        return False
    first = f'{match["indent"]}{match["target"]}_once = C.convert({match["source"]}, {match["axis"]}, "{match["text"]}")'
    again = f'{match["indent"]}{match["target"]} = C.convert({match["target"]}_once, {match["axis"]}, "{match["text"]}")'
    lines[index : index + 1] = [first, again]
    return True


@mutation_of(CONVERSION)
def other_placement(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    source, target = match["text"].split(" -> ")
    changed = [source, target]
    changed[random.randrange(2)] = random.choice(KINDS)
    lines[index] = lines[index].replace(f'"{match["text"]}"', f'"{" -> ".join(changed)}"')
    return " -> ".join(changed) != match["text"]


@mutation_of(CONVERSION)
def other_axis(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    axis = random.choice(("dp", "tp", "tp2"))
    lines[index] = lines[index].replace(f", {match['axis']}, ", f", self.mesh.{axis}, ", 1)
    return axis != match["axis"] and any(f'"{axis}":' in line for line in lines if "mesh_axes" in line)


@mutation_of(LINE)
def scaled(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    if "C.start" in match["code"] or match["code"].rstrip().endswith("("):
        return False
    lines[index] = f"{match['indent']}{match['target']}_raw = {match['code']}"
    lines.insert(
        index + 1, f"{match['indent']}{match['target']} = {match['target']}_raw * {random.choice(('2.0', '0.5', '1.0'))}"
    )
    return True


@mutation_of(LINE)
def cut_off(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    """A gradient that is lost."""
    if "C.start" in match["code"] or match["code"].rstrip().endswith("("):
        return False
    lines[index] = f"{match['indent']}{match['target']}_raw = {match['code']}"
    lines.insert(index + 1, f"{match['indent']}{match['target']} = {match['target']}_raw.detach()")
    return True


@mutation_of(LINE)
def other_operand(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    before = [m["target"] for line in lines[max(0, index - 12) : index] if (m := LINE.match(line))]
    used = [name for name in re.findall(r"\b[a-z]\w*\b", match["code"]) if name in before]
    if len(before) < 2 or not used:
        return False
    old, new = random.choice(used), random.choice(before)
    lines[index] = lines[index].replace(match["code"], re.sub(rf"\b{old}\b", new, match["code"], count=1), 1)
    return old != new


@mutation_of(LINE)
def other_number(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    numbers = list(re.finditer(r"(?<![\w.])\d+(\.\d+)?(e-?\d+)?\b", match["code"]))
    if not numbers:
        return False
    number = random.choice(numbers)
    new = str(float(number[0]) * 2) if number[1] or number[2] else str(max(0, int(number[0]) + random.choice((-1, 1, 2))))
    code = match["code"][: number.start()] + new + match["code"][number.end() :]
    lines[index] = lines[index].replace(match["code"], code, 1)
    return new != number[0]


@mutation_of(r"^\s+ParameterSpec\(")
def other_shard_of_a_parameter(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    old = lines[index]
    if re.search(r"S\(\d", old):
        lines[index] = re.sub(r"S\(\d(,\d+)?\)", random.choice(("S(0)", "S(1)", "R", "I")), old, count=1)
    else:
        lines[index] = old.replace("{}", f'{{"tp": "{random.choice(("S(0)", "R"))}"}}')
    return lines[index] != old


@mutation_of(r".*C\.wait\((\w+)\)")
def wait_missing(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    lines[index] = re.sub(r"C\.wait\((\w+)\)", r"\1", lines[index])
    return True


@mutation_of(r'^        "\w+": \{"\w+": "S\(0\)"\},')
def other_batch(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    lines[index] = lines[index].replace('"S(0)"', random.choice(('"R"', '"S(1)"')))
    return True


@mutation_of(r".*for i in range\((\d+)\)")
def other_layers(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    count = int(match[1])
    lines[index] = lines[index].replace(f"range({count})", random.choice((f"range({count - 1})", f"range(1, {count})")))
    return True


@mutation_of(r"^(?P<indent>\s+)return (?P<a>\w+), (?P<b>\w+)(?P<rest>.*)$")
def other_results(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    lines[index] = f"{match['indent']}return {match['b']}, {match['a']}{match['rest']}"
    return True


@mutation_of(r".*(F\.silu|F\.gelu|F\.relu| \+ | - | \* )")
def other_operation(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    old = match[1]
    new = random.choice([each for each in (SAME_SHAPE if old.startswith("F") else (" + ", " - ", " * ")) if each != old])
    lines[index] = lines[index].replace(old, new, 1)
    return True


@mutation_of(r".*(micro_batches = \d+|trainable=False|\"sum\"|zero = \d|, -100)")
def other_mode(lines: Lines, random: Random, index: int, match: re.Match[str]) -> bool:
    """Micro-batches, totals, stored kinds of parameters."""
    change = {"trainable=False": "trainable=True", '"sum"': '"max"', ", -100": ", -1"}
    old = match[1]
    lines[index] = lines[index].replace(old, change.get(old, "micro_batches = 4" if "micro" in old else old), 1)
    return change.get(old) is not None or "micro" in old


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
