"""Ray's PACK, as its scheduler does it: where a placement group's bundles go, bundle by bundle.

    bundles --std::sort, more GPUs and then more CPUs first--> the freest node takes all that it can --> the next freest

From Ray 2.60's `BundlePackSchedulingPolicy` and `LeastResourceScorer` (C++). `std::sort` is libstdc++'s introsort, with
which Ray's Linux wheels are built: stable up to 16 elements, and not above. tests/controller/test_placement_on_nodes.py
compares this with a real cluster.
"""

from collections.abc import Callable, Sequence

from controller.actors.layout import Bundle

Less = Callable[[int, int], bool]
THRESHOLD = 16  # libstdc++'s: shorter ranges are left to an insertion sort


def pack(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> list[int]:
    """The node of every bundle. Among equally free nodes the first is taken, where Ray takes any.

    Raises ValueError if there is no room.
    """
    free, candidates = [dict(node) for node in nodes], list(range(len(nodes)))
    placed = [-1] * len(bundles)
    waiting = ray_order(bundles)
    while waiting:
        node = max(candidates, key=lambda node: _score(bundles[waiting[0]], free[node]))
        if _score(bundles[waiting[0]], free[node]) < 0:
            raise ValueError("no room")
        candidates.remove(node)
        for bundle in list(waiting):
            if all(free[node].get(name, 0.0) + 1e-9 >= amount for name, amount in bundles[bundle].items()):
                for name, amount in bundles[bundle].items():
                    free[node][name] -= amount
                placed[bundle] = node
                waiting.remove(bundle)
    return placed


def ray_order(bundles: Sequence[Bundle]) -> list[int]:
    """The order in which Ray places bundles: more GPUs first, then more CPUs; equal ones as the sort leaves them."""
    keys = [(bundle.get("GPU", 0.0), bundle.get("CPU", 0.0)) for bundle in bundles]
    order = list(range(len(bundles)))
    standard_sort(order, lambda a, b: keys[b] < keys[a])
    return order


def standard_sort(items: list[int], less: Less) -> None:
    """libstdc++'s `std::sort`, in place, without its heap sort for ranges that do not get shorter: such end here."""
    _introsort(items, 0, len(items), 2 * max(1, len(items)).bit_length(), less)
    _insertion_sort(items, less)


def _introsort(items: list[int], first: int, last: int, depth: int, less: Less) -> None:
    while last - first > THRESHOLD:
        assert depth, "std::sort would go on with a heap sort, which is not ported"
        depth -= 1
        cut = _partition(items, first, last, less)
        _introsort(items, cut, last, depth, less)
        last = cut


def _partition(items: list[int], first: int, last: int, less: Less) -> int:
    """Put a median of three first, and split what follows by it."""
    _median_to_first(items, first, (first + 1, first + (last - first) // 2, last - 1), less)
    low, high = first + 1, last
    while True:
        while less(items[low], items[first]):
            low += 1
        high -= 1
        while less(items[first], items[high]):
            high -= 1
        if not low < high:
            return low
        items[low], items[high] = items[high], items[low]
        low += 1


def _median_to_first(items: list[int], first: int, three: tuple[int, int, int], less: Less) -> None:
    a, b, c = three
    if less(items[a], items[b]):
        median = b if less(items[b], items[c]) else c if less(items[a], items[c]) else a
    else:
        median = a if less(items[a], items[c]) else c if less(items[b], items[c]) else b
    items[first], items[median] = items[median], items[first]


def _insertion_sort(items: list[int], less: Less) -> None:
    for position in range(1, len(items)):
        item = items[position]
        while position > 0 and less(item, items[position - 1]):
            items[position] = items[position - 1]
            position -= 1
        items[position] = item


def _score(bundle: Bundle, free: Bundle) -> float:
    """How much of what the bundle asks for would be left, resource by resource; below 0 where there is no room."""
    if any(free.get(name, 0.0) + 1e-9 < amount for name, amount in bundle.items()):
        return -1.0
    return sum((free[name] - amount) / free[name] for name, amount in bundle.items() if free[name])
