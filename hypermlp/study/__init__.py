"""The paper's design study: 33 labelled variants, on MAD and as language models, and its seven claims."""
