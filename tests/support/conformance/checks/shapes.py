"""Answers that clients parse into models of pydantic, which these clients bring."""

from typing import Literal

from pydantic import BaseModel


class City(BaseModel):
    """The answer to the question for a capital."""

    country: str
    capital: str


class Said(BaseModel):
    """Say it."""

    word: Literal["yes"]
