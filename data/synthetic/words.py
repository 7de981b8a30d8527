"""Words of generated cases, and keys made from them."""

import functools
import itertools
from collections.abc import Sequence

ADJECTIVES = """
able amber ancient bitter blue brave brief bright broad calm clean clear clever cold cool crisp
curly damp dark deep dim dry dull eager early easy faint fair fast fierce fine firm flat fresh
gentle glad golden grand gray great green happy hard harsh heavy high hollow honest huge humble icy
jolly keen kind large late lazy lean light little lively lone long loud low lucky mellow mild misty
modest narrow neat new noble odd old open pale patient plain polite proud quick quiet rapid rare raw
red rich ripe rough round royal rusty sandy sharp shiny short shy silent silver simple sleepy slim
slow small smart smooth soft solid sour spare stark steady steep stern still strong subtle sunny
sweet swift tall tame tender thick thin tidy tiny tired vast vivid warm weak wet white wide wild
windy wise young
""".split()  # noqa: SIM905 - a list of quoted words is hard to read
NOUNS = """
acorn anchor apple arrow badge barn basin basket beach bell bench birch boat bottle bowl branch
bread brick bridge brook broom bucket button cabin cable candle canoe canyon card carpet castle cave
cedar chair chalk chest circle cliff clock cloud coast coin comet copper coral cotton cradle crane
creek crown curtain daisy desert desk dock door dove dragon drum eagle engine falcon feather fence
fern field flame flute forest fountain fox garden gate glacier glove goose grape hammer harbor hat
hawk hedge helmet heron hill honey horn horse house island ivory jacket jar jewel kettle key kite
ladder lake lamp lantern leaf lemon letter lily lion lock magnet maple marble market meadow melon
mill mirror moon mountain needle nest oak ocean orchard otter owl paddle palace paper path pearl
pebble pencil piano pillow pine pipe planet plum pond pumpkin quilt rabbit raft rain raven ribbon
ridge ring river road robin rocket roof rope rose saddle sail salmon scarf shadow shell ship shovel
spoon spring star stone stove stream sun swan table teapot temple tent thread tower trail train tree
trumpet tulip tunnel turtle valley vase village violin wagon wall walnut water wave wheel whistle
willow window wolf wood
""".split()  # noqa: SIM905 - a list of quoted words is hard to read

KINDS = ("adjective_noun", "noun_noun")


def keys(kind: str, count: int) -> Sequence[str]:
    """Returns at least `count` distinct keys of two words, or three if two are too few.

    Args:
      kind: one of KINDS, what the first word is.
    """
    pairs = _pairs(kind)
    if count <= len(pairs):
        return pairs
    triples = (
        f"{pair}-{noun}" for noun in NOUNS for pair in pairs if not pair.endswith(f"-{noun}")
    )
    return [*pairs, *itertools.islice(triples, count - len(pairs))]


@functools.cache
def _pairs(kind: str) -> tuple[str, ...]:
    first = ADJECTIVES if kind == "adjective_noun" else NOUNS
    return tuple(f"{word}-{noun}" for word, noun in itertools.product(first, NOUNS) if word != noun)
