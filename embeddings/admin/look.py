"""A stored vector decoded, measured and drawn."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from django.utils.safestring import SafeString

from .. import charts, vectors
from ..charts import Summary, number
from ..models import Passage, VectorSpace

FIRST = 8
"""Components listed in figures."""


@dataclass
class Look:
    """Everything a page says about one passage's vector. `problem` names what keeps it from being read, or what looks wrong with it."""

    passage: Passage
    space: VectorSpace

    @cached_property
    def _decoded(self) -> tuple[np.ndarray | None, str]:
        p = self.passage
        try:
            return vectors.decode(p.vector, p.rows, p.dims, p.dtype), ""
        except ValueError as error:
            return None, str(error)

    @property
    def array(self) -> np.ndarray | None:
        """[rows, dims], or None where the bytes do not fit their description."""
        return self._decoded[0]

    @cached_property
    def summary(self) -> Summary | None:
        return None if self.array is None else Summary.of(self.array)

    @cached_property
    def norms(self) -> np.ndarray:
        """[rows] f64, euclidean."""
        return np.zeros(0) if self.array is None else np.linalg.norm(self.array.astype(np.float64), axis=1)

    @cached_property
    def norm_summary(self) -> Summary:
        return Summary.of(self.norms)

    @property
    def norm(self) -> str:
        if self.array is None:
            return "–"
        if len(self.norms) == 1:
            return f"{self.norms[0]:.6f}"
        s = self.norm_summary
        return f"{number(s.least)} … {number(s.most)}, mean {number(s.mean)}"

    @cached_property
    def problem(self) -> str:
        if self._decoded[1]:
            return self._decoded[1]
        assert self.summary is not None
        if not self.summary.finite:
            return f"{self.summary.defects} among {self.summary.size} components"
        if not self.norms.all():
            return "a row of zeros: it is as near to everything as to nothing"
        # Half precision keeps 11 bits of each component; 2e-3 is beyond what that can do to a norm of 1.
        if self.space.normalize == 2 and np.abs(self.norms - 1).max() > 2e-3:
            return "the space is normalised to length 1, this vector is not"
        if self.passage.space_id != self.space.pk:
            return "of another vector space than the collection's: not searched"
        return ""

    @cached_property
    def first(self) -> str:
        """The first components of the first row."""
        if self.array is None or not self.array.size:
            return ""
        return ", ".join(number(float(v)) for v in self.array[0, :FIRST]) + (", …" if self.array.shape[1] > FIRST else "")

    @cached_property
    def largest(self) -> list[tuple[int, str]]:
        """Components of the first row that are farthest from zero: (index from 0, value)."""
        if self.array is None or not self.array.size:
            return []
        row = self.array[0].astype(np.float64)
        order = np.argsort(-np.abs(np.where(np.isfinite(row), row, 0)), kind="stable")[:FIRST]
        return [(int(i), f"{row[i]:+.4f}") for i in order]

    @property
    def small(self) -> SafeString | str:
        return self._sparkline("small", 168, 26)

    @property
    def sparkline(self) -> SafeString | str:
        return self._sparkline("components", 640, 100)

    def _sparkline(self, what: str, width: int, height: int) -> SafeString | str:
        """The components of a single vector; of many, their norms, row by row."""
        if self.array is None:
            return ""
        values, drawn = (self.norms, "Norm of each row") if len(self.array) > 1 else (self.array[0], "Components")
        name = f"{drawn} of part {self.passage.part}"
        return charts.sparkline(values, id=f"{what}-{self.passage.pk}", name=name, width=width, height=height)

    @property
    def histogram(self) -> SafeString | str:
        if self.array is None:
            return ""
        name = f"Distribution of the components of part {self.passage.part}"
        return charts.histogram(self.array, id=f"histogram-{self.passage.pk}", name=name)


def similarity(query: np.ndarray, rows: np.ndarray) -> float:
    """Cosine of single vectors; of several rows MaxSim, the sum over query rows of their best cosine. query [Q, D], rows [R, D] -> float"""
    def unit(matrix: np.ndarray) -> np.ndarray:
        matrix = matrix.astype(np.float64)
        return np.asarray(matrix / np.maximum(np.linalg.norm(matrix, axis=1, keepdims=True), 1e-12))
    return float((unit(query) @ unit(rows).T).max(axis=1).sum())
