"""One physical memory for the KV caches of several models: pages, virtual spaces, layouts and backends."""

from elastic.engine.kv.layout import KvLayout
from elastic.engine.kv.pages import OutOfPages, PageBackend, PagePool, PageSpace
