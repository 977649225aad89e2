import './base.css';
import './others.css';
