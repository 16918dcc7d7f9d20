from .scorer import Scorer as Scorer
