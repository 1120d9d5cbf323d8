"""The paper's controlled design study: 33 labelled variants, on MAD and as language models, with its six claims."""
