"""Formulas for the seconds of collectives over a hierarchy of links.

Levels count from inside the node outwards: level i joins w_i groups of the next inner level, so ``w_1 ... w_L = n`` members. The
algorithms: a ring through all members in the order of the levels (every node forwards the whole tensor, through as many network
cards as it has members: NCCL, and what nccl-tests calls bus bandwidth), a double binary tree of nodes (Sanders, Speck, Traeff:
Two-tree algorithms, 2009; NCCL since 2.4), reductions in the switch (NVLink SHARP), and hierarchical (one level after the other).

Sources: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005 (sections 4 and 5);
Patarasuk and Yuan: Bandwidth optimal all-reduce, 2009 (theorem 1); the latency terms are those of NCCL's tuner
(src/graph/tuning.cc, ncclTopoTuneModel: steps inside and between nodes counted apart; a tree is a chain in the node, binary
between nodes).
"""

from __future__ import annotations

from autopar.cost_models.formulas.formula import Formula

MAX_LEVELS = 5
PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
_THAKUR = "Thakur et al. 2005, section 4; NCCL tuning.cc"


def _inside(level: int) -> str:
    """Members of one group of level - 1, which share the traffic that crosses `level`: ``*w1*w2``."""
    return "".join(f"*w{i}" for i in range(1, level))


def _groups_of(level: int, levels: int) -> str:
    """Return the number of groups of `level`."""
    return "".join(f"*w{i}" for i in range(level + 1, levels + 1))


def _maximum(terms: list[str]) -> str:
    return terms[0] if len(terms) == 1 else f"Max({', '.join(terms)})"


def _parameters(levels: int, extra: tuple[tuple[str, str], ...] = ()) -> tuple[tuple[str, str], ...]:
    out = [("launch", "seconds to start a kernel"), ("N", "bytes of the whole tensor")]
    for i in range(1, levels + 1):
        out += [
            (f"w{i}", f"groups that level {i} joins"),
            (f"a{i}", f"seconds of one step through level {i}"),
            (f"b{i}", f"bytes per second of one member on level {i}"),
        ]
    return (*out, *extra)


def _ring(kind: str, levels: int) -> Formula:
    """n - 1 steps, of which ``(w_i - 1) w_(i+1) ... w_L`` cross level i; each member forwards all but its shard."""
    each, n = range(1, levels + 1), "*".join(f"w{i}" for i in range(1, levels + 1))
    steps = " + ".join(f"(w{i} - 1){_groups_of(i, levels)}*a{i}" for i in each)
    sent = "1" if kind == "broadcast" else f"(1 - 1/({n}))"
    transfer = _maximum([f"{sent}*N/(b{i}{_inside(i)})" for i in each])
    text = f"launch + {PASSES.get(kind, 1)}*({steps} + {transfer})"
    return Formula(f"{kind}.ring.{levels}", text, _parameters(levels), f"{_THAKUR}; Patarasuk and Yuan 2009")


def _hierarchical(kind: str, levels: int) -> Formula:
    """A ring on each level, pipelined in chunks: level i carries ``1 / (w_1 ... w_(i-1))`` of the tensor for each member."""
    each = range(1, levels + 1)
    steps = " + ".join(f"(w{i} - 1)*a{i}" for i in each)
    transfer = _maximum([f"{'1' if kind == 'broadcast' else f'(1 - 1/w{i})'}*N/(b{i}{_inside(i)})" for i in each])
    text = f"launch + {PASSES.get(kind, 1)}*({steps} + {transfer})"
    return Formula(f"{kind}.hierarchical.{levels}", text, _parameters(levels), _THAKUR)


def _tree(levels: int) -> Formula:
    """Up and down: a chain in the node, two binary trees between nodes; a node sends the tensor ``c`` times (up, and half of it
    to each of two children in one of the trees: 2; with two nodes 1)."""
    first = 1 if levels == 1 else 2
    depth = " + ".join(f"d{i}*a{i}" for i in range(1, levels + 1))
    transfer = [f"c*N/(b{i}{_inside(i)})" for i in range(first, levels + 1)]
    chain = [] if levels == 1 else ["2*(1 - 1/w1)*N/b1"]
    extra = [(f"d{i}", f"depth on level {i}: chain w - 1 in the node, else log2 w rounded up") for i in range(1, levels + 1)]
    parameters = _parameters(levels, (*extra, ("c", "times that a node sends the tensor: 2, or 1 with two nodes")))
    source = "Sanders, Speck, Traeff 2009; NCCL tuning.cc"
    return Formula(f"all_reduce.tree.{levels}", f"launch + 2*({depth}) + {_maximum([*chain, *transfer])}", parameters, source)


def _switch(levels: int) -> Formula:
    """The switch adds: a member sends the tensor once and its own sum once more; a tree between nodes."""
    depth = "".join(f" + d{i}*a{i}" for i in range(2, levels + 1))
    transfer = _maximum(["(1 + 1/w1)*N/bs", *(f"c*N/(b{i}{_inside(i)})" for i in range(2, levels + 1))])
    extra = [("s", "seconds of one pass through the switch"), ("bs", "bytes per second of one member on sums in the switch")]
    extra += [(f"d{i}", f"depth on level {i}: log2 w rounded up") for i in range(2, levels + 1)]
    extra += [("c", "times that a node sends the tensor: 2, or 1 with two nodes")] if levels > 1 else []
    source = "multimem load-reduce and store, NVLink SHARP; NCCL algorithms NVLS and NVLSTree"
    return Formula(
        f"all_reduce.switch.{levels}", f"launch + 2*(s{depth}) + {transfer}", _parameters(levels, tuple(extra)), source
    )


def _direct(levels: int) -> Formula:
    """Everyone to everyone: ``N / n**2`` to each other member."""
    each = range(1, levels + 1)
    latency = " + ".join(f"(w{i} - 1){_inside(i)}*a{i}" for i in each)
    transfer = _maximum([f"h{i}*N/b{i}" for i in each])
    extra = tuple(
        (f"h{i}", f"share of the tensor that a member moves over level {i}: (w - 1) inside / n**2; on a ring times the hops")
        for i in each
    )
    text = f"launch + {latency} + {transfer}"
    return Formula(f"all_to_all.direct.{levels}", text, _parameters(levels, extra), "Thakur et al. 2005, section 5 (pairwise)")


def _point_to_point() -> Formula:
    return Formula("point_to_point.direct.1", "launch + a1 + N/b1", _parameters(1), "Hockney 1994: latency and bandwidth")


def _parameter_server() -> Formula:
    """Every worker pushes its gradient and pulls the weights; the servers' links carry all of it."""
    extra = (("n", "workers"), ("servers", "servers, each with one link"))
    text = "launch + 2*(a1 + n*N/(servers*b1))"
    return Formula("parameter_server.direct.1", text, _parameters(1, extra), "Li et al., OSDI 2014: push and pull")


def _all() -> tuple[Formula, ...]:
    """Every kind and algorithm for one to `MAX_LEVELS` levels, named ``kind.algorithm.levels``."""
    out: list[Formula] = []
    for levels in range(1, MAX_LEVELS + 1):
        for kind in (*PASSES, "broadcast"):
            out += [_ring(kind, levels), _hierarchical(kind, levels)]
        out += [_tree(levels), _switch(levels), _direct(levels)]
    return (*out, _point_to_point(), _parameter_server())


FORMULAS = _all()
