"""Long-range attention in JAX: patterns, terms, memories and stacks that combine freely.

Importing this package is cheap: it loads neither JAX nor any part of its own. Import what you need, such as
`from lra.attention import sliding_window`.
"""

__version__ = "0.1.0.dev0"
