CREATE TABLE audit (
	id VARCHAR(40) NOT NULL,
	at_us BIGINT NOT NULL,
	actor VARCHAR(40) NOT NULL,
	action VARCHAR(64) NOT NULL,
	resource VARCHAR(200) NOT NULL,
	project VARCHAR(40),
	status INTEGER NOT NULL,
	request_id VARCHAR(40) NOT NULL,
	CONSTRAINT pk_audit PRIMARY KEY (id)
);
CREATE TABLE capacities (
	provider VARCHAR(64) NOT NULL,
	gpus INTEGER,
	version INTEGER NOT NULL,
	CONSTRAINT pk_capacities PRIMARY KEY (provider)
);
CREATE TABLE idempotency (
	actor VARCHAR(40) NOT NULL,
	"key" VARCHAR(255) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	status INTEGER NOT NULL,
	headers JSON NOT NULL,
	body BLOB NOT NULL,
	created_us BIGINT NOT NULL,
	CONSTRAINT pk_idempotency PRIMARY KEY (actor, "key")
);
CREATE TABLE projects (
	id VARCHAR(40) NOT NULL,
	name VARCHAR(64) NOT NULL,
	unix_user VARCHAR(32),
	created_us BIGINT NOT NULL,
	version INTEGER NOT NULL,
	CONSTRAINT pk_projects PRIMARY KEY (id),
	CONSTRAINT uq_projects_name UNIQUE (name)
);
CREATE TABLE retention (
	scope VARCHAR(40) NOT NULL,
	runs_days INTEGER,
	trajectories_days INTEGER,
	checkpoints_days INTEGER,
	logs_days INTEGER,
	uploads_days INTEGER,
	version INTEGER NOT NULL,
	CONSTRAINT pk_retention PRIMARY KEY (scope)
);
CREATE TABLE server (
	"key" VARCHAR(64) NOT NULL,
	value TEXT NOT NULL,
	CONSTRAINT pk_server PRIMARY KEY ("key")
);
CREATE TABLE used_nonces (
	hash BLOB NOT NULL,
	expires_us BIGINT NOT NULL,
	CONSTRAINT pk_used_nonces PRIMARY KEY (hash)
);
CREATE TABLE users (
	id VARCHAR(40) NOT NULL,
	email VARCHAR(254),
	issuer VARCHAR(255),
	subject VARCHAR(255),
	name VARCHAR(200) NOT NULL,
	created_us BIGINT NOT NULL,
	vouched_until_us BIGINT,
	CONSTRAINT pk_users PRIMARY KEY (id),
	CONSTRAINT uq_users_email UNIQUE (email)
);
CREATE TABLE accounts (
	project VARCHAR(40) NOT NULL,
	deleted_nano_usd BIGINT NOT NULL,
	day INTEGER NOT NULL,
	deleted_today_nano_usd BIGINT NOT NULL,
	marks JSON NOT NULL,
	warned JSON NOT NULL,
	jobs_usd FLOAT NOT NULL,
	CONSTRAINT pk_accounts PRIMARY KEY (project),
	CONSTRAINT fk_accounts_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE jobs (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40) NOT NULL,
	pool VARCHAR(64) NOT NULL,
	fingerprint VARCHAR(64) NOT NULL,
	config TEXT NOT NULL,
	train_gpus INTEGER NOT NULL,
	usd FLOAT NOT NULL,
	waits TEXT,
	created_us BIGINT NOT NULL,
	ended_us BIGINT,
	retired JSON,
	announced INTEGER,
	CONSTRAINT pk_jobs PRIMARY KEY (id),
	CONSTRAINT fk_jobs_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE members (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40) NOT NULL,
	user VARCHAR(40) NOT NULL,
	role VARCHAR(16) NOT NULL,
	source VARCHAR(16) NOT NULL,
	version INTEGER NOT NULL,
	created_us BIGINT NOT NULL,
	removed_us BIGINT,
	CONSTRAINT pk_members PRIMARY KEY (id),
	CONSTRAINT fk_members_project FOREIGN KEY(project) REFERENCES projects (id),
	CONSTRAINT fk_members_user FOREIGN KEY(user) REFERENCES users (id)
);
CREATE TABLE quotas (
	project VARCHAR(40) NOT NULL,
	gpus JSON NOT NULL,
	runs_max INTEGER,
	usd_per_day FLOAT,
	budget_usd FLOAT,
	weight FLOAT NOT NULL,
	version INTEGER NOT NULL,
	CONSTRAINT pk_quotas PRIMARY KEY (project),
	CONSTRAINT fk_quotas_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE refresh_tokens (
	person VARCHAR(40) NOT NULL,
	sealed BLOB NOT NULL,
	checked_us BIGINT NOT NULL,
	CONSTRAINT pk_refresh_tokens PRIMARY KEY (person),
	CONSTRAINT fk_refresh_tokens_person FOREIGN KEY(person) REFERENCES users (id)
);
CREATE TABLE runs (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40) NOT NULL,
	name VARCHAR(64) NOT NULL,
	config TEXT NOT NULL,
	providers JSON NOT NULL,
	labels JSON NOT NULL,
	wanted VARCHAR(16) NOT NULL,
	force BOOLEAN NOT NULL,
	budget_usd FLOAT,
	caps JSON NOT NULL,
	max_restarts INTEGER NOT NULL,
	generation INTEGER NOT NULL,
	created_by VARCHAR(40) NOT NULL,
	created_us BIGINT NOT NULL,
	managed BOOLEAN NOT NULL,
	observed_generation INTEGER NOT NULL,
	phase VARCHAR(16) NOT NULL,
	cause TEXT NOT NULL,
	conditions JSON NOT NULL,
	figures JSON NOT NULL,
	process JSON,
	attempt INTEGER NOT NULL,
	restarts INTEGER NOT NULL,
	furthest_step INTEGER NOT NULL,
	not_before_us BIGINT NOT NULL,
	started_us BIGINT,
	ended_us BIGINT,
	needs JSON,
	shares JSON,
	limits JSON,
	told JSON,
	limits_number INTEGER NOT NULL,
	allotted_nano_usd BIGINT,
	cost_nano_usd BIGINT NOT NULL,
	day INTEGER NOT NULL,
	day_base_nano_usd BIGINT NOT NULL,
	warned BOOLEAN NOT NULL,
	waits JSON,
	retired JSON,
	CONSTRAINT pk_runs PRIMARY KEY (id),
	CONSTRAINT fk_runs_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE secrets (
	project VARCHAR(40) NOT NULL,
	name VARCHAR(64) NOT NULL,
	sealed BLOB NOT NULL,
	updated_us BIGINT NOT NULL,
	CONSTRAINT pk_secrets PRIMARY KEY (project, name),
	CONSTRAINT fk_secrets_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE uploads (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40) NOT NULL,
	name VARCHAR(64) NOT NULL,
	files JSON NOT NULL,
	bytes BIGINT NOT NULL,
	created_by VARCHAR(40) NOT NULL,
	created_us BIGINT NOT NULL,
	CONSTRAINT pk_uploads PRIMARY KEY (id),
	CONSTRAINT fk_uploads_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE webhooks (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40) NOT NULL,
	url TEXT NOT NULL,
	events JSON NOT NULL,
	secret BLOB NOT NULL,
	disabled TEXT,
	failures INTEGER DEFAULT '0' NOT NULL,
	open_until_us BIGINT DEFAULT '0' NOT NULL,
	claimed_until_us BIGINT DEFAULT '0' NOT NULL,
	version INTEGER NOT NULL,
	created_us BIGINT NOT NULL,
	CONSTRAINT pk_webhooks PRIMARY KEY (id),
	CONSTRAINT fk_webhooks_project FOREIGN KEY(project) REFERENCES projects (id)
);
CREATE TABLE deliveries (
	id VARCHAR(40) NOT NULL,
	webhook VARCHAR(40) NOT NULL,
	type VARCHAR(64) NOT NULL,
	body TEXT NOT NULL,
	state VARCHAR(16) NOT NULL,
	attempts INTEGER NOT NULL,
	not_before_us BIGINT NOT NULL,
	answer TEXT NOT NULL,
	created_us BIGINT NOT NULL,
	CONSTRAINT pk_deliveries PRIMARY KEY (id),
	CONSTRAINT fk_deliveries_webhook FOREIGN KEY(webhook) REFERENCES webhooks (id)
);
CREATE TABLE keys (
	id VARCHAR(40) NOT NULL,
	project VARCHAR(40),
	name VARCHAR(64) NOT NULL,
	role VARCHAR(16) NOT NULL,
	scopes JSON NOT NULL,
	hash BLOB NOT NULL,
	hint VARCHAR(16) NOT NULL,
	created_us BIGINT NOT NULL,
	expires_us BIGINT,
	revoked_us BIGINT,
	member VARCHAR(40),
	CONSTRAINT pk_keys PRIMARY KEY (id),
	CONSTRAINT fk_keys_project FOREIGN KEY(project) REFERENCES projects (id),
	CONSTRAINT uq_keys_hash UNIQUE (hash),
	CONSTRAINT fk_keys_member FOREIGN KEY(member) REFERENCES members (id)
);
CREATE TABLE sessions (
	hash BLOB NOT NULL,
	"key" VARCHAR(40),
	member VARCHAR(40),
	created_us BIGINT NOT NULL,
	expires_us BIGINT NOT NULL,
	CONSTRAINT pk_sessions PRIMARY KEY (hash),
	CONSTRAINT fk_sessions_key FOREIGN KEY("key") REFERENCES keys (id),
	CONSTRAINT fk_sessions_member FOREIGN KEY(member) REFERENCES members (id)
);
CREATE INDEX ix_audit_project_id ON audit (project, id);
CREATE INDEX ix_idempotency_created_us ON idempotency (created_us);
CREATE INDEX ix_used_nonces_expires_us ON used_nonces (expires_us);
CREATE UNIQUE INDEX ix_users_issuer_subject ON users (issuer, subject);
CREATE INDEX ix_jobs_project_ended_us ON jobs (project, ended_us);
CREATE UNIQUE INDEX ix_members_project_user ON members (project, user);
CREATE INDEX ix_members_user ON members (user);
CREATE INDEX ix_runs_managed ON runs (managed);
CREATE INDEX ix_runs_phase_id ON runs (phase, id);
CREATE INDEX ix_runs_project_id ON runs (project, id);
CREATE INDEX ix_uploads_project_id ON uploads (project, id);
CREATE INDEX ix_webhooks_project_id ON webhooks (project, id);
CREATE INDEX ix_deliveries_state_not_before_us ON deliveries (state, not_before_us);
CREATE INDEX ix_deliveries_webhook_id ON deliveries (webhook, id);
CREATE INDEX ix_keys_member ON keys (member);
CREATE INDEX ix_keys_project_id ON keys (project, id);
CREATE INDEX ix_sessions_expires_us ON sessions (expires_us);
CREATE INDEX ix_sessions_member ON sessions (member);
