from pathlib import Path
from typing import Any

import pytest
from vllm.tokenizers import get_tokenizer

from testkit.executor import write_model_directory


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer whose tokens are single bytes: letters may take several."""
    directory: Path = write_model_directory(tmp_path_factory.mktemp("model"))
    return get_tokenizer(str(directory))
