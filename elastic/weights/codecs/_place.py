"""To be imported before any codec: each looks at once for where its compiled form is kept."""

from elastic.system.compiled import settle

settle()
