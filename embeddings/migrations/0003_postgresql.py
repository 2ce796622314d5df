"""What only PostgreSQL needs: vectors kept as they are (they do not compress), and an index for the beginnings of external ids."""
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

FORWARDS = (
    "ALTER TABLE embeddings_passage ALTER COLUMN vector SET STORAGE EXTERNAL",
    "ALTER TABLE embeddings_chunk ALTER COLUMN documents SET STORAGE EXTERNAL",
    "CREATE INDEX documents_by_prefix ON embeddings_document (collection_id, external_id varchar_pattern_ops)",
)
BACKWARDS = (
    "DROP INDEX documents_by_prefix",
    "ALTER TABLE embeddings_chunk ALTER COLUMN documents SET STORAGE EXTENDED",
    "ALTER TABLE embeddings_passage ALTER COLUMN vector SET STORAGE EXTENDED",
)


def _run(statements: tuple[str, ...], editor: BaseDatabaseSchemaEditor) -> None:
    if editor.connection.vendor == "postgresql":
        for statement in statements:
            editor.execute(statement)


class Migration(migrations.Migration):

    dependencies = [("embeddings", "0002_jobs")]

    operations = [migrations.RunPython(lambda apps, editor: _run(FORWARDS, editor), lambda apps, editor: _run(BACKWARDS, editor))]
