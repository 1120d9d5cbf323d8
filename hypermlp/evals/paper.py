"""The paper's language-model table: its columns, its printed values, and how it ranks models."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Column(NamedTuple):
    """One column of a table, as a task of lm-evaluation-harness."""

    title: str
    task: str
    shots: int
    metric: str
    higher_is_better: bool = True


COLUMNS = (
    Column("MMLU-P", "leaderboard_mmlu_pro", 5, "acc"),
    Column("GPQA", "leaderboard_gpqa", 0, "acc_norm"),
    Column("BBH", "leaderboard_bbh", 3, "acc_norm"),
    Column("MATH", "leaderboard_math_hard", 4, "exact_match"),
    Column("MuSR", "leaderboard_musr", 0, "acc_norm"),
    Column("IFE-I", "leaderboard_ifeval", 0, "inst_level_strict_acc"),
    Column("IFE-P", "leaderboard_ifeval", 0, "prompt_level_strict_acc"),
    Column("ARC-C", "arc_challenge", 0, "acc_norm"),
    Column("ARC-E", "arc_easy", 0, "acc_norm"),
    Column("HS", "hellaswag", 0, "acc_norm"),
    Column("PIQA", "piqa", 0, "acc_norm"),
    Column("BoolQ", "boolq", 0, "acc"),
    Column("WinoG", "winogrande", 0, "acc"),
    Column("COPA", "copa", 0, "acc"),
    Column("OBQA", "openbookqa", 0, "acc_norm"),
    Column("SciQ", "sciq", 0, "acc_norm"),
)


class Printed(NamedTuple):
    scores: tuple[float, ...]
    average_rank: float
    bests: int


# fmt: off
PRINTED = {  # by size
    "1.3B": {
        "DeltaNet": Printed((.109, .263, .308, .011, .417, .288, .165, .266, .522, .502, .704, .611, .541, .740, .318, .761), 4.22, 0),
        "GSA": Printed((.110, .270, .294, .013, .438, .300, .179, .287, .529, .510, .712, .541, .536, .760, .330, .773), 2.84, 4),
        "RetNet": Printed((.110, .252, .293, .001, .384, .056, .024, .271, .489, .480, .701, .583, .533, .710, .324, .736), 6.69, 0),
        "HGRN": Printed((.114, .269, .297, .008, .409, .253, .122, .271, .518, .481, .707, .584, .515, .700, .326, .695), 5.12, 0),
        "HGRN2": Printed((.115, .254, .295, .002, .350, .223, .129, .282, .504, .317, .671, .416, .522, .770, .328, .378), 5.84, 1),
        "SoftmaxAttn": Printed((.114, .259, .296, .011, .365, .270, .141, .280, .492, .492, .705, .621, .552, .760, .318, .769), 4.22, 2),
        "GLA": Printed((.114, .259, .295, .006, .427, .272, .157, .277, .482, .488, .702, .574, .541, .690, .326, .721), 5.19, 0),
        "HyperGLU": Printed((.120, .268, .321, .012, .468, .286, .189, .366, .611, .516, .708, .613, .531, .760, .353, .788), 1.88, 9),
    },
    "340M": {
        "DiffTrans": Printed((.109, .259, .299, .008, .390, .266, .133, .289, .531, .408, .668, .603, .534, .690, .330, .734), 4.13, 2),
        "GatedDeltaNet": Printed((.113, .260, .296, .010, .421, .258, .133, .276, .527, .396, .662, .588, .527, .710, .338, .735), 3.81, 2),
        "DeltaNet": Printed((.112, .260, .300, .009, .452, .277, .150, .269, .502, .405, .653, .519, .504, .690, .316, .717), 4.81, 1),
        "GLA": Printed((.110, .258, .289, .007, .415, .228, .109, .247, .478, .366, .637, .547, .489, .640, .294, .649), 7.56, 0),
        "SoftmaxAttn": Printed((.106, .267, .292, .010, .386, .269, .126, .273, .506, .396, .650, .569, .499, .720, .324, .727), 5.28, 3),
        "ReLUAttn+KVConv": Printed(
            (.111, .253, .290, .008, .423, .229, .130, .268, .525, .412, .669, .524, .520, .660, .324, .774), 5.13, 1
        ),
        "HyperMLP": Printed((.119, .262, .300, .010, .466, .273, .155, .288, .541, .402, .663, .585, .513, .710, .320, .755), 2.97, 4),
        "HyperGLU": Printed((.117, .259, .313, .009, .451, .273, .157, .304, .538, .427, .674, .587, .518, .720, .336, .771), 2.31, 6),
    },
}
# fmt: on


def ranks(scores: Sequence[float]) -> list[float]:
    """From 1 for the highest; equal scores share the mean of their ranks."""
    return [sum(other > one for other in scores) + (scores.count(one) + 1) / 2 for one in scores]


class Standing(NamedTuple):
    average_rank: float
    bests: int
    """Columns in which no other model is better."""


def standings(scores: Mapping[str, Sequence[float]]) -> dict[str, Standing]:
    """How models stand among each other, by the scores, the higher the better, that they have in the same columns."""
    columns = [list(column) for column in zip(*scores.values(), strict=True)]
    ranked = [ranks(column) for column in columns]
    return {
        model: Standing(
            average_rank=statistics.fmean(column[place] for column in ranked),
            bests=sum(column[place] == max(column) for column in columns),
        )
        for place, model in enumerate(scores)
    }
