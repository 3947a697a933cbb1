"""What happens to a backward graph so that its gradients are averaged over ranks while it is still running.

The work is divided by three verbs:

- **plan** (``plan``, ``bucketing``, ``launching``; for "auto" ``choosing``, ``sizing``, ``cutting``, ``runs``,
  ``step`` and ``cost``): pure data and functions. Which gradients travel together, and in which order.
  A plan is made of frozen dataclasses and tuples; it knows no graph node, tensor, rank or environment variable.
- **rewrite** (the other modules here): graph in, graph out. A pass edits the graph module it is given and nothing else.
- **run** (the ``fxddp`` package): executes what the passes emitted, and is the only caller of ``torch.distributed``.

This package imports torch, the standard library and itself, never the rest of ``fxddp``. The folder sits at the top of
the repository and is reached through a link in ``fxddp``: always import it as ``fxddp.passes``. A bare
``import passes`` would load a second copy of every class.
"""
