"""Less to do for every document that goes in. Its collection is not looked up (models.py says why that is safe), and on PostgreSQL one index
serves equality, beginnings and order of external ids: they are compared byte by byte, as SQLite does, whatever the database's language.
"""
import django.db.models.deletion
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

FORWARDS = (
    "DROP INDEX documents_by_prefix",
    'ALTER TABLE embeddings_document ALTER COLUMN external_id TYPE varchar(512) COLLATE "C"',
)
BACKWARDS = (
    'ALTER TABLE embeddings_document ALTER COLUMN external_id TYPE varchar(512) COLLATE "default"',
    "CREATE INDEX documents_by_prefix ON embeddings_document (collection_id, external_id varchar_pattern_ops)",
)


def _run(statements: tuple[str, ...], editor: BaseDatabaseSchemaEditor) -> None:
    if editor.connection.vendor == "postgresql":
        for statement in statements:
            editor.execute(statement)


class Migration(migrations.Migration):

    dependencies = [("embeddings", "0004_documents_without_a_second_index")]

    operations = [
        migrations.AlterField(
            model_name="document",
            name="collection",
            field=models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.CASCADE,
                                    related_name="documents", to="embeddings.collection"),
        ),
        migrations.RunPython(lambda apps, editor: _run(FORWARDS, editor), lambda apps, editor: _run(BACKWARDS, editor)),
    ]
