# SPDX-License-Identifier: Apache-2.0
"""Whitening as a step of a scikit-learn pipeline: distances between neighbours then count every direction alike."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.base import BaseEstimator, OneToOneFeatureMixin, TransformerMixin
from sklearn.datasets import make_classification
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.validation import check_is_fitted, validate_data

import matroots


class Whitener(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    """``(x - mean_) @ matrix_``; ``error_`` is a proven bound on the relative error of the covariance's inverse root."""

    def __init__(self, kind: str = "zca", rel_damping: float = 1e-6) -> None:
        self.kind = kind
        self.rel_damping = rel_damping

    def fit(self, X: np.ndarray, y: object = None) -> Whitener:
        """Find mean and matrix."""
        x = torch.tensor(validate_data(self, X, dtype=np.float64, ensure_min_samples=2))
        found = matroots.whiten_ex(x, self.kind, rel_damping=self.rel_damping, certify=True)
        self.mean_, self.matrix_ = found.mean.numpy(), found.matrix.numpy()
        self.error_ = found.root.certificate.relative_error.item()
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Whiten rows, of these or of other data."""
        check_is_fitted(self)
        return (validate_data(self, X, dtype=np.float64, reset=False) - self.mean_) @ self.matrix_


def main() -> None:
    """Compare neighbours before and after, by cross-validation."""
    X, y = make_classification(600, 20, n_informative=6, n_redundant=10, random_state=0)
    X = X @ np.random.default_rng(0).normal(size=(20, 20))  # hides the informative directions
    for name, step in (("standardised", StandardScaler()), ("whitened", Whitener(rel_damping=1e-3))):
        score = cross_val_score(make_pipeline(step, KNeighborsClassifier()), X, y).mean()
        print(f"{name}: {score:.3f} of the test samples are classified correctly")
    print(f"certified error of the root: {Whitener().fit(X).error_:.1e}")


if __name__ == "__main__":
    main()
