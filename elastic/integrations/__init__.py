"""Modules that trainers of other projects import. They import nothing else of Elastic."""
