BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('v3.2.0.a');
CREATE TABLE autotune_alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT autotune_alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "autotune_alembic_version" VALUES('0007');
CREATE TABLE autotune_answers (
	"key" VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_answers PRIMARY KEY ("key")
);
INSERT INTO "autotune_answers" VALUES('inspection-1','inspection','{"context_bytes":0,"model":{"parameters":4386178}}','2026-11-21 15:41:14.829417');
INSERT INTO "autotune_answers" VALUES('prediction-1','prediction','{"batches":[],"largest_batch":64}','2026-11-21 15:41:14.831121');
CREATE TABLE autotune_environments (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_environments PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_environments_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_environments" VALUES('2c91ab0fdc77446090671ec5c97d9f08','environment-1','{"device":"cpu"}','2026-11-21 15:41:14.827901');
CREATE TABLE autotune_job_events (
	job_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_job_events PRIMARY KEY (job_id, number)
);
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',1,'state','{"state":"queued"}','2026-11-22 09:58:23.876401');
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',2,'state','{"state":"running","agent":"22222222222222222222222222222222"}','2026-11-22 09:58:23.910570');
INSERT INTO "autotune_job_events" VALUES('11111111111111111111111111111111',3,'state','{"state":"finished"}','2026-11-22 09:58:23.914234');
INSERT INTO "autotune_job_events" VALUES('33333333333333333333333333333333',1,'state','{"state":"queued"}','2026-11-22 09:58:23.919223');
CREATE TABLE autotune_jobs (
	number INTEGER NOT NULL, 
	id VARCHAR(32) NOT NULL, 
	study VARCHAR(512) NOT NULL, 
	request JSON NOT NULL, 
	needs_kind VARCHAR(16), 
	needs_gpu VARCHAR(64), 
	needs_memory_bytes BIGINT, 
	needs_count INTEGER NOT NULL, 
	priority INTEGER NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	is_cancel_asked BOOLEAN NOT NULL, 
	attempts INTEGER NOT NULL, 
	problem JSON, 
	status JSON, 
	events INTEGER NOT NULL, 
	submitted_by VARCHAR(64) NOT NULL, 
	submitted_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	idempotency_key VARCHAR(128), losses INTEGER DEFAULT '0' NOT NULL, heard INTEGER DEFAULT '0' NOT NULL, device JSON, 
	CONSTRAINT pk_autotune_jobs PRIMARY KEY (number), 
	CONSTRAINT uq_autotune_jobs_id UNIQUE (id), 
	CONSTRAINT uq_autotune_jobs_idempotency_key UNIQUE (idempotency_key)
);
INSERT INTO "autotune_jobs" VALUES(1,'11111111111111111111111111111111','frozen','{"model":"bert-tiny","effective_batch":64}',NULL,NULL,NULL,1,0,'finished',0,1,NULL,NULL,3,'operator','2026-11-22 09:58:23.869177','2026-11-22 09:58:23.883183','2026-11-22 09:58:23.911564','key-1',0,0,'{"host":"host","name":null,"kind":"cpu","uuids":[]}');
INSERT INTO "autotune_jobs" VALUES(2,'33333333333333333333333333333333','waits','{"model":"bert-large-uncased"}','cuda','h200',68719476736,1,1,'queued',0,0,NULL,NULL,1,'','2026-11-22 09:58:23.915088',NULL,NULL,NULL,0,0,NULL);
CREATE TABLE autotune_leases (
	name VARCHAR(544) NOT NULL, 
	token VARCHAR(32) NOT NULL, 
	owner VARCHAR(256) NOT NULL, 
	host VARCHAR(256) NOT NULL, 
	machine VARCHAR(256) NOT NULL, 
	pid INTEGER NOT NULL, 
	process_started VARCHAR(32) NOT NULL, 
	acquired_at DATETIME NOT NULL, 
	heartbeat_at DATETIME NOT NULL, 
	expires_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_leases PRIMARY KEY (name)
);
INSERT INTO "autotune_leases" VALUES('study frozen','33333333333333333333333333333333','ada','gpu-2','gpu-2 boot pid:[1]',71,'12345','2026-11-22 09:00:00.000000','2026-11-22 09:00:15.000000','2026-11-22 09:01:15.000000');
CREATE TABLE autotune_studies (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(512) NOT NULL, 
	workload_id VARCHAR(32) NOT NULL, 
	environment_id VARCHAR(32) NOT NULL, 
	request JSON NOT NULL, 
	ceiling JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	stopped_because TEXT, 
	best_trial_id VARCHAR(32), 
	baseline_trial_id VARCHAR(32), 
	started_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	seconds DOUBLE NOT NULL, 
	autotune_version VARCHAR(64) NOT NULL, stop_reason VARCHAR(16), left_out JSON, 
	CONSTRAINT pk_autotune_studies PRIMARY KEY (id), 
	CONSTRAINT fk_autotune_studies_workload_id_autotune_workloads FOREIGN KEY(workload_id) REFERENCES autotune_workloads (id), 
	CONSTRAINT fk_autotune_studies_environment_id_autotune_environments FOREIGN KEY(environment_id) REFERENCES autotune_environments (id), 
	CONSTRAINT uq_autotune_studies_name UNIQUE (name)
);
INSERT INTO "autotune_studies" VALUES('0636808b05714e3098f7d0217a3df578','frozen','a1b5a22cc6494b94b1a97d0fbd1d4c9c','2c91ab0fdc77446090671ec5c97d9f08','{"effective_batch":64}','{"cap_bytes":17179869184}','finished','no remaining candidate is worth a trial','3cd57ed014e44132908435ab90f8459b',NULL,'2026-11-21 15:41:14.832213','2026-11-21 15:41:14.911628',9.0,'0.1.0','nothing_left','[{"arms":["all fp16","tf32, checkpointing"],"reason":"fp16 is never faster than bf16 and needs as much memory"}]');
CREATE TABLE autotune_tokens (
	id VARCHAR(32) NOT NULL, 
	name VARCHAR(64) NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	role VARCHAR(16) NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_tokens PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_tokens_digest UNIQUE (digest)
);
INSERT INTO "autotune_tokens" VALUES('df0a51300ee44629841c00b0b256c305','operator','0000000000000000000000000000000000000000000000000000000000000000','run','2026-11-22 09:58:23.925972');
CREATE TABLE autotune_trials (
	id VARCHAR(32) NOT NULL, 
	study_id VARCHAR(32) NOT NULL, 
	number INTEGER NOT NULL, 
	stage VARCHAR(16) NOT NULL, 
	candidate JSON NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	outcome JSON, 
	log_path TEXT, 
	started_at DATETIME NOT NULL, 
	seconds DOUBLE, 
	workload_id VARCHAR(32) NOT NULL, 
	environment_id VARCHAR(32) NOT NULL, 
	CONSTRAINT pk_autotune_trials PRIMARY KEY (id), 
	CONSTRAINT fk_autotune_trials_study_id_autotune_studies FOREIGN KEY(study_id) REFERENCES autotune_studies (id), 
	CONSTRAINT fk_autotune_trials_workload_id_autotune_workloads FOREIGN KEY(workload_id) REFERENCES autotune_workloads (id), 
	CONSTRAINT fk_autotune_trials_environment_id_autotune_environments FOREIGN KEY(environment_id) REFERENCES autotune_environments (id)
);
INSERT INTO "autotune_trials" VALUES('3cd57ed014e44132908435ab90f8459b','0636808b05714e3098f7d0217a3df578',0,'search','{"per_device_train_batch_size":8,"gradient_accumulation_steps":2,"precision":"fp32","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','completed','{"measurement":{"step_seconds":0.2,"step_seconds_each":[0.2,0.21],"relative_spread":0.01,"samples_per_second":300.0,"peak_allocated_bytes":1073741824,"peak_reserved_bytes":2147483648,"warmup_step_seconds":[],"micro_steps_run":1,"optimizer_seconds":null,"data_seconds":null,"device_used_bytes":null,"peak_reserved_first_step_bytes":null,"allocation_retries":null,"train_loss":null,"skipped_steps":null,"joules_per_sample":null,"compile_seconds":null,"worst_batch_tokens":null,"worst_batch_step_seconds":null,"worst_batch_peak_allocated_bytes":null,"worst_batch_peak_reserved_bytes":null},"phase_seconds":{},"disturbed":[],"state":"completed","source":null}',NULL,'2026-11-21 15:41:14.862812',3.0,'a1b5a22cc6494b94b1a97d0fbd1d4c9c','2c91ab0fdc77446090671ec5c97d9f08');
INSERT INTO "autotune_trials" VALUES('4f917e4a41374c1c8435e7b4448baec3','0636808b05714e3098f7d0217a3df578',1,'search','{"per_device_train_batch_size":16,"gradient_accumulation_steps":2,"precision":"fp32","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','out_of_memory','{"message":"CUDA out of memory","where":"device","during":"train","peak_allocated_bytes":8589934592,"peak_reserved_bytes":17179869184,"phase_seconds":{},"disturbed":[],"state":"out_of_memory","source":null}',NULL,'2026-11-21 15:41:14.885271',3.0,'a1b5a22cc6494b94b1a97d0fbd1d4c9c','2c91ab0fdc77446090671ec5c97d9f08');
INSERT INTO "autotune_trials" VALUES('210d3395b91646f89ac7d097d3346b83','0636808b05714e3098f7d0217a3df578',2,'search','{"per_device_train_batch_size":24,"gradient_accumulation_steps":2,"precision":"fp32","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','failed','{"reason":"timeout","message":"took longer than 60 s","during":"","traceback":"","phase_seconds":{},"state":"failed"}',NULL,'2026-11-21 15:41:14.903721',3.0,'a1b5a22cc6494b94b1a97d0fbd1d4c9c','2c91ab0fdc77446090671ec5c97d9f08');
CREATE TABLE autotune_workloads (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_workloads PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_workloads_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_workloads" VALUES('a1b5a22cc6494b94b1a97d0fbd1d4c9c','workload-1','{"model":"bert-tiny"}','2026-11-21 15:41:14.821956');
CREATE TABLE studies (
	study_id INTEGER NOT NULL, 
	study_name VARCHAR(512) NOT NULL, 
	PRIMARY KEY (study_id)
);
INSERT INTO "studies" VALUES(1,'frozen');
CREATE TABLE study_directions (
	study_direction_id INTEGER NOT NULL, 
	direction VARCHAR(8) NOT NULL, 
	study_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	PRIMARY KEY (study_direction_id), 
	UNIQUE (study_id, objective), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "study_directions" VALUES(1,'MAXIMIZE',1,0);
CREATE TABLE study_system_attributes (
	study_system_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_system_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
CREATE TABLE study_user_attributes (
	study_user_attribute_id INTEGER NOT NULL, 
	study_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (study_user_attribute_id), 
	UNIQUE (study_id, "key"), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
CREATE TABLE trial_heartbeats (
	trial_heartbeat_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	heartbeat DATETIME NOT NULL, 
	PRIMARY KEY (trial_heartbeat_id), 
	UNIQUE (trial_id), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_intermediate_values (
	trial_intermediate_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	step INTEGER NOT NULL, 
	intermediate_value FLOAT, 
	intermediate_value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_intermediate_value_id), 
	UNIQUE (trial_id, step), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_params (
	param_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	param_name VARCHAR(512), 
	param_value FLOAT, 
	distribution_json TEXT, 
	PRIMARY KEY (param_id), 
	UNIQUE (trial_id, param_name), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_params" VALUES(1,1,'per_device_train_batch_size',16.0,'{"name": "IntDistribution", "attributes": {"log": false, "step": 8, "low": 8, "high": 64}}');
INSERT INTO "trial_params" VALUES(2,2,'per_device_train_batch_size',8.0,'{"name": "IntDistribution", "attributes": {"log": false, "step": 8, "low": 8, "high": 64}}');
INSERT INTO "trial_params" VALUES(3,3,'per_device_train_batch_size',32.0,'{"name": "IntDistribution", "attributes": {"log": false, "step": 8, "low": 8, "high": 64}}');
CREATE TABLE trial_system_attributes (
	trial_system_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_system_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
CREATE TABLE trial_user_attributes (
	trial_user_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_user_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_user_attributes" VALUES(1,1,'autotune_trial_id','"3cd57ed014e44132908435ab90f8459b"');
INSERT INTO "trial_user_attributes" VALUES(2,2,'autotune_trial_id','"4f917e4a41374c1c8435e7b4448baec3"');
INSERT INTO "trial_user_attributes" VALUES(3,3,'autotune_trial_id','"210d3395b91646f89ac7d097d3346b83"');
CREATE TABLE trial_values (
	trial_value_id INTEGER NOT NULL, 
	trial_id INTEGER NOT NULL, 
	objective INTEGER NOT NULL, 
	value FLOAT, 
	value_type VARCHAR(7) NOT NULL, 
	PRIMARY KEY (trial_value_id), 
	UNIQUE (trial_id, objective), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_values" VALUES(1,1,0,300.0,'FINITE');
CREATE TABLE trials (
	trial_id INTEGER NOT NULL, 
	number INTEGER, 
	study_id INTEGER, 
	state VARCHAR(8) NOT NULL, 
	datetime_start DATETIME, 
	datetime_complete DATETIME, 
	PRIMARY KEY (trial_id), 
	FOREIGN KEY(study_id) REFERENCES studies (study_id)
);
INSERT INTO "trials" VALUES(1,0,1,'COMPLETE','2026-11-21 15:41:14.844787','2026-11-21 15:41:14.870490');
INSERT INTO "trials" VALUES(2,1,1,'PRUNED','2026-11-21 15:41:14.878962','2026-11-21 15:41:14.891389');
INSERT INTO "trials" VALUES(3,2,1,'FAIL','2026-11-21 15:41:14.896797','2026-11-21 15:41:14.909262');
CREATE TABLE version_info (
	version_info_id INTEGER NOT NULL, 
	schema_version INTEGER, 
	library_version VARCHAR(256), 
	PRIMARY KEY (version_info_id), 
	CHECK (version_info_id=1)
);
INSERT INTO "version_info" VALUES(1,12,'5.0.0');
CREATE INDEX ix_autotune_trials_study_id_number ON autotune_trials (study_id, number);
CREATE INDEX ix_autotune_trials_environment_id_workload_id ON autotune_trials (environment_id, workload_id);
CREATE UNIQUE INDEX ix_studies_study_name ON studies (study_name);
CREATE INDEX ix_trials_study_id ON trials (study_id);
CREATE INDEX ix_autotune_jobs_state_number ON autotune_jobs (state, number);
CREATE INDEX ix_autotune_jobs_study ON autotune_jobs (study);
CREATE INDEX ix_autotune_jobs_state_place ON autotune_jobs (state, (number - 100 * priority));
COMMIT;
