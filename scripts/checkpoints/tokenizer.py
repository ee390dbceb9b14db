"""A byte-level BPE with a family's special tokens, trained on a list of English words.

Every word of `WORDS` becomes one token with its leading space, so that what a random
model says reads as words; any other text still encodes, byte by byte if need be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

WORDS = """
a about above across after again against all alone along already also always among an
ancient and angle animal another answer any apart arch are area arm around arrow as ash
at autumn away back balance bank bark basket be beach beam bear because bed before behind
being below beneath beside between beyond bird black blossom blue board boat body bold
bone book border both bottom bowl branch bread breath brick bridge bright bring broad
brown building bush but butterfly by calm camera candle castle cat ceiling centre chair
change child circle city clay clean clear cliff clock close cloth cloud coast coat coffee
cold colour column common copper corner could country cover crowd cup curve dark dawn day
deep describe detail diagonal distance dome door down drawing dream dry dust each early
earth east edge eight empty end even evening ever every eye face far feather few field
figure fine fire first fish five flag flat floor flower fold foot for forest form four
frame fresh from front fruit full garden gate gentle glass glow go gold grass gravel
great green grey ground group grow half hand harbour hat he head heavy helmet her here
high hill his hold horizon horse house how huge human idea image in inside into iron
island it its journey just keep kind lake lamp land large last late layer leaf left less
letter light like line little long look low make many map marble mark market meadow metal
middle mirror mist moment moon more morning most mountain mouth move much music narrow
near never new next night nine no noon north not now object ocean of often old on once
one only open orange other our out outside over page paint pair pale paper part past path
pattern people person petal photograph picture pink place plain plant plate point pool
portrait pottery quiet rain reach red reflection repeat rest ribbon right river road rock
roof room root rose rough round row sail same sand scene sea season second see seed seven
shadow shape sharp she shell shine ship shore short side silk silver sister six sky sleep
slow small smile smoke snow so soft soil some song south space spoon square stair stand
star steam steel step still stone storm story straight stream street strong suit summer
sun surface table tail tall temple ten texture than that the their them then there these
they thick thin thing this three through tile time to together top touch tower town track
tree triangle turn two under until up valley very view village voice walk wall warm was
water wave we west wet what wheat wheel when where which whisker white who whole wide
will wind window wing winter with without woman wood word work world would yard year
yellow yes yet you young
""".split()  # noqa: SIM905 (a list literal would be a word a line)

# Two shapes of each word and the punctuation of prose, often enough that every
# merge down to the whole word is learnt.
_CORPUS = [f" {word} {word} {word}" for word in WORDS] + [
    f"{word.capitalize()}, {word}. {word}?\n{word}: {word}!" for word in WORDS
]
_MAX_VOCABULARY = 4096


def build_tokenizer(
    special: Iterable[str],
    marks: Mapping[str, str],
    named: Mapping[str, str],
    prose: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Train the tokenizer; takes a fraction of a second and is deterministic.

    Args:
        special: tokens beside those that mark turns and the end of a text.
        marks: what stands for an item in a chat, by the modalities that it may hold.
        named: attributes of the tokenizer that processors ask for their tokens.
        prose: that it is trained on beside the words.
    """
    special = [END_OF_TEXT, IM_START, IM_END, *special]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        [*_CORPUS, *prose],
        trainers.BpeTrainer(
            vocab_size=_MAX_VOCABULARY,
            min_frequency=3,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    # Last, as in Qwen's own vocabulary: ordinary tokens keep the low ids.
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    template = f"{{%- set marks = {json.dumps(dict(marks))} -%}}\n{template}"
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[t for t in special if t not in (IM_END, END_OF_TEXT)],
        chat_template=template,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
        **({"model_specific_special_tokens": dict(named)} if named else {}),
    )


def word_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Ids of the tokens that are whole words with a leading space."""
    pieces = tokenizer.get_vocab()
    return sorted(pieces[f"Ġ{word}"] for word in set(WORDS) if f"Ġ{word}" in pieces)
