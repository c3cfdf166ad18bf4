"""Names that people can say, for runs that were given none: brisk-otter-4k7d2."""

from __future__ import annotations

# Short and plain: 123 and 121 words.
_HOW = (
    "able agile alert amber ample apt azure balmy basic bold brave breezy bright brisk broad "
    "calm candid careful cheery chief civil classy clean clear clever coastal comfy cool copper "
    "coral cosmic cosy crisp curious daring deft dewy direct double eager early earnest easy "
    "elated epic equal exact fair famous fancy fast festive fine firm fleet fluent fond frank "
    "free fresh frosty gentle giant glad gleeful golden good grand great green happy hardy "
    "hearty helpful honest humble ideal indigo ivory jade jaunty jolly jovial keen kind large "
    "lasting light lively local loyal lucid lucky lunar magic main major mellow merry mighty "
    "mild misty modern neat nimble noble novel olive open patient placid plucky polite prime "
    "proud quick quiet rapid ready rosy royal ruby rustic "
)
_WHO = (
    "adder albatross alpaca antelope badger bat bear beaver bee beetle bison boar bobcat bream "
    "buffalo bunting camel caribou carp cat cheetah chough cicada civet clam cobra cod condor "
    "coot cougar coyote crab crane cricket crow cuckoo curlew deer dingo dipper dolphin "
    "dormouse dove dragonfly duck dunlin eagle eel egret eider elk ermine falcon ferret finch "
    "firefly flamingo fox frog gannet gazelle gecko gibbon giraffe gnu goat godwit goose gopher "
    "grebe grouse gull haddock hare hawk hedgehog heron herring hobby hoopoe hornet horse hyena "
    "ibex ibis iguana impala jackal jackdaw jay kestrel kingfisher kite kiwi koala krill lark "
    "lemming lemur leopard linnet lion lizard llama lobster lynx macaw magpie mallard mantis "
    "marlin marmot marten merlin mink mole moose moth mouse newt ocelot "
)
# Without vowels there are no words in it, and nothing in it looks like another letter.
_LETTERS = "23456789bcdfghjkmnpqrstvwxyz"
_MOST_LETTERS = 5


def readable(random: bytes) -> str:
    """A name for these bytes: always the same one.

    There are 2.5 x 10^11 names: of 10,000 runs no two have the same one, but for 1 case in 5,000.
    """
    number = int.from_bytes(random[:16], "big")
    words = []
    for known in (_HOW.split(), _WHO.split()):
        number, which = divmod(number, len(known))
        words.append(known[which])
    letters = ""
    for _ in range(_MOST_LETTERS):
        number, which = divmod(number, len(_LETTERS))
        letters += _LETTERS[which]
    return "-".join((*words, letters))
