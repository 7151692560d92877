"""Places for loads of exports."""

import pytest

from paramd.errors import ConflictError, ExhaustedError
from paramd_service.exports.loading import MAX_CONCURRENT, Loading


def test_one_edit_is_loaded_once_at_a_time() -> None:
    loading = Loading()
    with loading.place("a"):
        with pytest.raises(ConflictError, match="edit a is being loaded"), loading.place("a"):
            pass
        with loading.place("b"):
            pass
    with loading.place("a"), loading.place(None):
        assert MAX_CONCURRENT == 2
        with pytest.raises(ExhaustedError), loading.place("c"):
            pass
    with loading.place("c"):
        pass
