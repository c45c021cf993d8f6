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
INSERT INTO "autotune_alembic_version" VALUES('0002');
CREATE TABLE autotune_answers (
	"key" VARCHAR(64) NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_answers PRIMARY KEY ("key")
);
INSERT INTO "autotune_answers" VALUES('inspection-1','inspection','{"context_bytes":650117120}','2026-11-21 15:41:15.073383');
CREATE TABLE autotune_environments (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_environments PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_environments_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_environments" VALUES('f0c901b6651a4c2180ee436334f58071','319473dcf1480f1a','{"device_label":"cuda:0","device_kind":"cuda","device_name":"NVIDIA H200","device_uuid":"GPU-00000000-0000-0000-0000-000000000000","device_memory_bytes":150323855360,"device_capability":[9,0],"driver":"580.159.04","measurement_revision":1,"cpus":null,"variables":{},"python":"3.11.2","packages":{"torch":"2.13.0","transformers":"5.23.0"},"cuda":"13.0","training_arguments_fields":["bf16","fp16"]}','2026-11-21 15:41:15.087199');
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
	autotune_version VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_autotune_studies PRIMARY KEY (id), 
	CONSTRAINT fk_autotune_studies_workload_id_autotune_workloads FOREIGN KEY(workload_id) REFERENCES autotune_workloads (id), 
	CONSTRAINT fk_autotune_studies_environment_id_autotune_environments FOREIGN KEY(environment_id) REFERENCES autotune_environments (id), 
	CONSTRAINT uq_autotune_studies_name UNIQUE (name)
);
INSERT INTO "autotune_studies" VALUES('7697f71f834a420780753b2e87cadc4f','bert','8f556f40bd78453cb92ca285a655ef0d','f0c901b6651a4c2180ee436334f58071','{"model":"bert-large-uncased","effective_batch":64,"world_size":1,"batch_multiple":null,"objective":"throughput","precision":null,"gradient_checkpointing":"auto","attn_implementation":null,"optim":["adamw_torch_fused"],"memory_limit_bytes":25769803776,"headroom_fraction":0.03,"headroom_bytes":null,"trials":null,"time_budget_seconds":null,"sampler":"autotune","seed":42,"trial_timeout_seconds":180.0,"measure_baseline":true,"fresh":false}','{"limit_bytes":25769803776,"free_bytes":149250113536,"context_bytes":650117120,"headroom":{"fraction":0.03,"size_bytes":null}}','running',NULL,NULL,NULL,'2026-11-21 15:41:15.089994',NULL,0.0,'0.1.0');
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
INSERT INTO "autotune_trials" VALUES('871ec4cebcc748ecb67e224cc3a4ae6e','7697f71f834a420780753b2e87cadc4f',0,'baseline','{"per_device_train_batch_size":8,"gradient_accumulation_steps":8,"precision":"fp32","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','completed','{"measurement":{"step_seconds":1.54449,"step_seconds_each":[1.54449,1.54449,1.54449],"relative_spread":0.005,"samples_per_second":41.43762665993305,"peak_allocated_bytes":12235833344,"peak_reserved_bytes":12381585408,"warmup_step_seconds":[],"micro_steps_run":3,"optimizer_seconds":null,"data_seconds":null,"device_used_bytes":null,"peak_reserved_first_step_bytes":null,"allocation_retries":null,"train_loss":null,"skipped_steps":null,"joules_per_sample":null,"compile_seconds":null,"worst_batch_tokens":null,"worst_batch_step_seconds":null,"worst_batch_peak_allocated_bytes":null,"worst_batch_peak_reserved_bytes":null},"phase_seconds":{},"disturbed":[],"state":"completed","source":null}','logs/trial-0000.log','2026-11-21 15:41:15.120378',7.25,'8f556f40bd78453cb92ca285a655ef0d','f0c901b6651a4c2180ee436334f58071');
INSERT INTO "autotune_trials" VALUES('2862984e03a844a390c0c460632140ce','7697f71f834a420780753b2e87cadc4f',1,'search','{"per_device_train_batch_size":32,"gradient_accumulation_steps":2,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','completed','{"measurement":{"step_seconds":0.21132,"step_seconds_each":[0.21132,0.21132,0.21132],"relative_spread":0.005,"samples_per_second":302.8582244936589,"peak_allocated_bytes":23367516160,"peak_reserved_bytes":23821549568,"warmup_step_seconds":[],"micro_steps_run":2,"optimizer_seconds":null,"data_seconds":null,"device_used_bytes":null,"peak_reserved_first_step_bytes":null,"allocation_retries":null,"train_loss":null,"skipped_steps":null,"joules_per_sample":null,"compile_seconds":null,"worst_batch_tokens":null,"worst_batch_step_seconds":null,"worst_batch_peak_allocated_bytes":null,"worst_batch_peak_reserved_bytes":null},"phase_seconds":{},"disturbed":[],"state":"completed","source":null}','logs/trial-0001.log','2026-11-21 15:41:15.149885',1.96000000000000085265e+00,'8f556f40bd78453cb92ca285a655ef0d','f0c901b6651a4c2180ee436334f58071');
INSERT INTO "autotune_trials" VALUES('72ed75956f334d59a6771382acc7df0a','7697f71f834a420780753b2e87cadc4f',2,'search','{"per_device_train_batch_size":64,"gradient_accumulation_steps":1,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','out_of_memory','{"message":"CUDA out of memory","where":"device","during":"train","peak_allocated_bytes":null,"peak_reserved_bytes":25119686656,"phase_seconds":{},"disturbed":[],"state":"out_of_memory","source":null}','logs/trial-0002.log','2026-11-21 15:41:15.175199',9.60000000000000852651e-01,'8f556f40bd78453cb92ca285a655ef0d','f0c901b6651a4c2180ee436334f58071');
INSERT INTO "autotune_trials" VALUES('1d51d935ed5f48c6a048700e1c2bc9fc','7697f71f834a420780753b2e87cadc4f',3,'search','{"per_device_train_batch_size":16,"gradient_accumulation_steps":4,"precision":"bf16","gradient_checkpointing":false,"attn_implementation":"sdpa","optim":"adamw_torch_fused","expandable_segments":false,"torch_compile":false,"use_liger_kernel":false,"dataloader_num_workers":0,"dataloader_prefetch_factor":null}','running',NULL,'logs/trial-0003.log','2026-11-21 15:41:15.193946',NULL,'8f556f40bd78453cb92ca285a655ef0d','f0c901b6651a4c2180ee436334f58071');
CREATE TABLE autotune_workloads (
	id VARCHAR(32) NOT NULL, 
	fingerprint VARCHAR(64) NOT NULL, 
	document JSON NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_autotune_workloads PRIMARY KEY (id), 
	CONSTRAINT uq_autotune_workloads_fingerprint UNIQUE (fingerprint)
);
INSERT INTO "autotune_workloads" VALUES('8f556f40bd78453cb92ca285a655ef0d','a958bbd93f71760e','{"model":"bert-large-uncased","config":{"model_type":"bert","architectures":["BertForMaskedLM"],"num_hidden_layers":24},"task":"sequence-classification","seq_len":512,"padding":0.0,"dtype":"float32","weights":null,"data":null,"peft":null,"lora_rank":null,"quantize":null,"source":null}','2026-11-21 15:41:15.085390');
CREATE TABLE studies (
	study_id INTEGER NOT NULL, 
	study_name VARCHAR(512) NOT NULL, 
	PRIMARY KEY (study_id)
);
INSERT INTO "studies" VALUES(1,'bert');
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
INSERT INTO "trial_params" VALUES(1,1,'per_device_train_batch_size',3.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(2,1,'precision',2.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(3,1,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(4,1,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(5,1,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(6,1,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(7,1,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(8,1,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(9,2,'per_device_train_batch_size',5.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(10,2,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(11,2,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(12,2,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(13,2,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(14,2,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(15,2,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(16,2,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(17,3,'per_device_train_batch_size',6.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(18,3,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(19,3,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(20,3,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(21,3,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(22,3,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(23,3,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(24,3,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(25,4,'per_device_train_batch_size',4.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [1, 2, 4, 8, 16, 32, 64]}}');
INSERT INTO "trial_params" VALUES(26,4,'precision',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["bf16", "fp16", "fp32", "tf32"]}}');
INSERT INTO "trial_params" VALUES(27,4,'gradient_checkpointing',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false, true]}}');
INSERT INTO "trial_params" VALUES(28,4,'attn_implementation',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["sdpa"]}}');
INSERT INTO "trial_params" VALUES(29,4,'optim',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": ["adamw_torch_fused"]}}');
INSERT INTO "trial_params" VALUES(30,4,'expandable_segments',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(31,4,'torch_compile',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
INSERT INTO "trial_params" VALUES(32,4,'use_liger_kernel',0.0,'{"name": "CategoricalDistribution", "attributes": {"choices": [false]}}');
CREATE TABLE trial_system_attributes (
	trial_system_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_system_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_system_attributes" VALUES(1,1,'fixed_params','{"per_device_train_batch_size": 8, "precision": "fp32", "gradient_checkpointing": false, "attn_implementation": "sdpa", "optim": "adamw_torch_fused", "expandable_segments": false, "torch_compile": false, "use_liger_kernel": false}');
INSERT INTO "trial_system_attributes" VALUES(2,1,'constraints:memory_over_line_gib','-11.161445312201977');
INSERT INTO "trial_system_attributes" VALUES(3,2,'constraints:memory_over_line_gib','-0.5071484372019768');
INSERT INTO "trial_system_attributes" VALUES(4,3,'constraints:memory_over_line_gib','0.7018359377980232');
CREATE TABLE trial_user_attributes (
	trial_user_attribute_id INTEGER NOT NULL, 
	trial_id INTEGER, 
	"key" VARCHAR(512), 
	value_json TEXT, 
	PRIMARY KEY (trial_user_attribute_id), 
	UNIQUE (trial_id, "key"), 
	FOREIGN KEY(trial_id) REFERENCES trials (trial_id)
);
INSERT INTO "trial_user_attributes" VALUES(1,1,'autotune_trial_id','"871ec4cebcc748ecb67e224cc3a4ae6e"');
INSERT INTO "trial_user_attributes" VALUES(2,1,'stage','"baseline"');
INSERT INTO "trial_user_attributes" VALUES(3,1,'gradient_accumulation_steps','8');
INSERT INTO "trial_user_attributes" VALUES(4,1,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(5,1,'samples_per_second','41.43762665993305');
INSERT INTO "trial_user_attributes" VALUES(6,1,'step_seconds','1.54449');
INSERT INTO "trial_user_attributes" VALUES(7,1,'peak_reserved_gib','11.53125');
INSERT INTO "trial_user_attributes" VALUES(8,2,'autotune_trial_id','"2862984e03a844a390c0c460632140ce"');
INSERT INTO "trial_user_attributes" VALUES(9,2,'stage','"search"');
INSERT INTO "trial_user_attributes" VALUES(10,2,'gradient_accumulation_steps','2');
INSERT INTO "trial_user_attributes" VALUES(11,2,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(12,2,'samples_per_second','302.8582244936589');
INSERT INTO "trial_user_attributes" VALUES(13,2,'step_seconds','0.21132');
INSERT INTO "trial_user_attributes" VALUES(14,2,'peak_reserved_gib','22.185546875');
INSERT INTO "trial_user_attributes" VALUES(15,3,'autotune_trial_id','"72ed75956f334d59a6771382acc7df0a"');
INSERT INTO "trial_user_attributes" VALUES(16,3,'stage','"search"');
INSERT INTO "trial_user_attributes" VALUES(17,3,'gradient_accumulation_steps','1');
INSERT INTO "trial_user_attributes" VALUES(18,3,'dataloader_num_workers','0');
INSERT INTO "trial_user_attributes" VALUES(19,3,'peak_reserved_gib','23.39453125');
INSERT INTO "trial_user_attributes" VALUES(20,4,'autotune_trial_id','"1d51d935ed5f48c6a048700e1c2bc9fc"');
INSERT INTO "trial_user_attributes" VALUES(21,4,'stage','"search"');
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
INSERT INTO "trial_values" VALUES(1,1,0,4.14376266599330520543e+01,'FINITE');
INSERT INTO "trial_values" VALUES(2,2,0,3.02858224493658894976e+02,'FINITE');
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
INSERT INTO "trials" VALUES(1,0,1,'COMPLETE','2026-11-21 15:41:15.108270','2026-11-21 15:41:15.135142');
INSERT INTO "trials" VALUES(2,1,1,'COMPLETE','2026-11-21 15:41:15.142589','2026-11-21 15:41:15.162757');
INSERT INTO "trials" VALUES(3,2,1,'PRUNED','2026-11-21 15:41:15.168108','2026-11-21 15:41:15.182602');
INSERT INTO "trials" VALUES(4,3,1,'RUNNING','2026-11-21 15:41:15.187081',NULL);
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
INSERT INTO "autotune_answers" VALUES('prediction-1','prediction','{"batches":[],"largest_batch":64}','2026-11-21 15:41:14.831121');
COMMIT;
