"""Table 1 of the paper: MAD accuracies, NanoGPT loss and convergence speed of its 33 variants."""

from typing import NamedTuple

LOSS_THRESHOLDS = (3.3, 3.2, 3.1, 3.0)
STEPS_PER_EVALUATION = 500


class PaperRow(NamedTuple):
    """One row of Table 1 of "HyperMLP: An Integrated Perspective for Sequence Modeling".

    Attributes:
        compression: accuracy on MAD's task of that name. This and the next five are percentages, each a mean
            over the task's settings in MAD's full grid (66 settings in all).
        fuzzy_recall: accuracy on fuzzy in-context recall.
        in_context_recall: accuracy on in-context recall.
        memorization: accuracy on memorization.
        noisy_recall: accuracy on noisy in-context recall.
        selective_copying: accuracy on selective copying.
        mad_average: mean of the six accuracies.
        loss: language-modelling loss, in nats per token, of NanoGPT with 124M parameters.
        evaluations_below: how many evaluations the loss took to fall below 3.3, 3.2, 3.1 and 3.0; None if it
            never did. Evaluations are 500 steps apart.

    Example::

        from hypermlp.label import PAPER_ROWS

        row = PAPER_ROWS["G-cg-q-12o"]
        print(row.loss, row.evaluations_below)  # 2.9865 (8, 13, 22, 58)
    """

    compression: float
    fuzzy_recall: float
    in_context_recall: float
    memorization: float
    noisy_recall: float
    selective_copying: float
    mad_average: float
    loss: float
    evaluations_below: tuple[int | None, int | None, int | None, int | None]


PAPER_ROWS = {
    "S": PaperRow(35.19, 8.92, 83.68, 29.24, 85.03, 62.08, 50.69, 3.9487, (18, None, None, None)),
    "S-p": PaperRow(44.69, 34.74, 93.43, 78.65, 86.32, 96.42, 72.38, 3.0669, (11, 20, 47, None)),
    "S-c": PaperRow(41.31, 62.44, 99.99, 78.31, 99.99, 51.05, 72.18, 3.0897, (15, 27, 64, None)),
    "S-pc": PaperRow(51.62, 51.10, 99.99, 86.81, 99.99, 91.39, 80.15, 3.0466, (11, 19, 39, None)),
    "R": PaperRow(34.87, 9.70, 74.19, 15.64, 77.53, 53.91, 44.31, 3.2573, (50, None, None, None)),
    "R-p": PaperRow(43.35, 31.38, 93.65, 68.83, 92.81, 97.34, 71.23, 3.0785, (13, 22, 54, None)),
    "R-c": PaperRow(39.91, 43.85, 99.99, 57.70, 99.99, 72.85, 69.05, 3.1070, (17, 31, 80, None)),
    "R-pc": PaperRow(44.41, 61.26, 100.00, 79.20, 99.99, 98.11, 80.50, 3.0481, (11, 19, 37, None)),
    "S-g-q": PaperRow(39.08, 51.52, 99.99, 78.51, 99.99, 54.88, 70.66, 3.0428, (13, 20, 41, None)),
    "R-cg-q": PaperRow(36.49, 32.57, 100.00, 57.70, 99.99, 73.90, 66.78, 3.0828, (16, 29, 76, 80)),
    "R-c-12o!": PaperRow(49.23, 65.12, 100.00, 71.24, 99.99, 99.31, 80.81, 3.0590, (10, 17, 36, None)),
    "R-cg-q-12o": PaperRow(49.20, 62.76, 99.99, 74.97, 99.99, 99.14, 81.01, 2.9956, (9, 14, 26, 72)),
    "R-pcg-q-12o": PaperRow(47.86, 36.22, 99.99, 66.06, 99.99, 99.29, 74.90, 3.0212, (10, 15, 28, 75)),
    "S-c-q": PaperRow(40.42, 60.37, 99.99, 77.53, 99.99, 44.30, 70.43, 3.1042, (16, 29, 78, None)),
    "S-c-v": PaperRow(33.57, 57.87, 99.99, 77.23, 99.99, 52.89, 70.26, 3.1384, (18, 33, None, None)),
    "R-c-q": PaperRow(37.28, 36.27, 99.99, 55.98, 100.00, 74.33, 67.31, 3.1762, (22, 55, None, None)),
    "R-c-v": PaperRow(31.84, 43.47, 100.00, 65.58, 99.99, 70.36, 68.54, 3.1323, (20, 44, 80, None)),
    "G-cg-q": PaperRow(38.56, 35.84, 99.99, 66.73, 99.99, 75.23, 69.39, 3.0530, (12, 21, 42, None)),
    "G-c-12o!": PaperRow(49.81, 65.77, 100.00, 72.98, 100.00, 99.67, 81.37, 3.0159, (9, 15, 28, 80)),
    "G-cg-q-12o": PaperRow(49.60, 61.50, 99.99, 76.07, 99.99, 99.58, 81.12, 2.9865, (8, 13, 22, 58)),
    "G-pcg-q-12o": PaperRow(49.90, 29.12, 99.98, 70.35, 99.99, 99.28, 74.77, 2.9974, (9, 13, 25, 77)),
    "G-cg-q-1o": PaperRow(47.35, 49.90, 99.99, 69.66, 99.99, 99.75, 77.77, 2.9907, (9, 13, 24, 68)),
    "R-cg-q-1o": PaperRow(47.34, 57.69, 99.99, 70.62, 99.99, 98.97, 79.10, 3.0001, (9, 14, 24, 75)),
    "G-g-q-12o": PaperRow(50.49, 58.88, 99.99, 76.95, 99.97, 99.25, 80.92, 2.9980, (9, 14, 24, 74)),
    "R-g-q-12o": PaperRow(49.14, 61.98, 99.99, 73.55, 99.97, 99.06, 80.61, 3.0130, (10, 16, 30, None)),
    "G-12o!": PaperRow(49.65, 49.56, 99.97, 72.38, 99.85, 99.72, 78.52, 3.0386, (12, 17, 33, None)),
    "G-1o!": PaperRow(47.15, 32.11, 99.96, 71.72, 99.96, 99.67, 75.09, 3.0556, (12, 20, 39, None)),
    "G-2o!": PaperRow(48.07, 68.35, 99.95, 52.55, 99.97, 96.52, 77.57, 3.0631, (16, 27, 55, None)),
    "R-12o!": PaperRow(49.36, 61.37, 99.95, 82.01, 99.97, 98.28, 81.82, 3.0497, (11, 17, 36, None)),
    "R-1o!": PaperRow(44.70, 60.51, 99.94, 77.17, 99.67, 99.43, 80.24, 3.0699, (12, 20, 47, None)),
    "R-2!": PaperRow(45.28, 64.03, 99.97, 75.75, 99.85, 96.05, 80.16, 3.1022, (17, 30, 72, None)),
    "G-12!": PaperRow(47.44, 6.81, 55.75, 16.45, 54.87, 95.74, 46.18, 4.3662, (None, None, None, None)),
    "R-12!": PaperRow(47.71, 8.02, 55.60, 16.28, 55.27, 94.78, 46.27, 4.3567, (None, None, None, None)),
}

# Printed label -> the label that its numbers fit, which the paper probably ran (docs/derivation.md)
PROBABLE_READING = {"S-g-q": "S-cg-q", "R-2!": "R-2o!"}
