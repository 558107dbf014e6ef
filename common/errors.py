"""What goes wrong through no bug: what cannot be done as it was asked for, what cannot go on, and too little memory."""


class UserError(ValueError):
    """Wrong input. Its message is one sentence: what is wrong, where, and what to set instead.

    The scripts print the sentence without a traceback and exit with code 2.
    """


class TrainingFailed(RuntimeError):
    """A run that cannot go on, through no bug. One sentence as well; the scripts exit with code 1."""


OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is Python's or PyTorch's way to say so, on any device. (Nothing here imports torch.)"""
    words = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and any(said in words for said in OUT_OF_MEMORY))
    )
