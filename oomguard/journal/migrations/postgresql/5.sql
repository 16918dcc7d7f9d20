-- The shared journal begins with schema 5; ../sqlite/*.sql says what each column means.
CREATE TABLE run (
  number BIGSERIAL PRIMARY KEY,
  session TEXT NOT NULL UNIQUE,
  original TEXT NOT NULL,
  folder TEXT,
  files TEXT,
  engine TEXT,
  engine_version TEXT,
  model TEXT,
  device TEXT,
  forgotten INTEGER NOT NULL DEFAULT 0,
  hides_secrets_alone INTEGER,
  who TEXT,
  host TEXT,
  clock_offset_s DOUBLE PRECISION  -- seconds added to the host's clock to get the server's
);
CREATE TABLE attempt (
  id BIGSERIAL PRIMARY KEY,
  session TEXT NOT NULL,
  number INTEGER NOT NULL,
  started_at DOUBLE PRECISION NOT NULL,
  ended_at DOUBLE PRECISION,
  command TEXT NOT NULL,
  settings TEXT NOT NULL,
  patches TEXT NOT NULL,
  incident JSON,
  predicted TEXT NOT NULL,
  measured TEXT NOT NULL,
  exit_status INTEGER,
  set_by_user TEXT,
  error TEXT
);
-- An attempt that is delivered twice is stored once.
CREATE UNIQUE INDEX attempt_once ON attempt (session, number);
CREATE INDEX attempt_started ON attempt (started_at);
-- The schema's number. Earlier versions migrated with Alembic, which gave the table its name.
CREATE TABLE alembic_version (version_num VARCHAR(32) PRIMARY KEY);
