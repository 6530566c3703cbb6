"""swarmnode: ordinary devices run one large Mixture-of-Experts model together."""

__version__ = "0.1.0"
