"""The tokenizer of the puzzle language, as transformers knows tokenizers: a word is a token."""

from typing import Any

from sparrow.tasks.words import EOS, PAD, WORDS


def puzzle_tokenizer() -> Any:
    """A transformers tokenizer; a word that the language lacks raises when it is encoded.

    The model names no word for unknown ones, so that there is nothing to fall back to: this is
    saved with every model and holds there too.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
